/* retention.c: which memory without blocks goes back to the system, and when.
 *
 * While ticks are open, by need. A window is ARENA__WINDOW ends of ticks. The fewest free spans that
 * there were at any time of it are those that nobody needed; what neither this window nor the one
 * before needed goes back at its end, so that a spike is forgotten after 3 windows at most.
 *
 * When the last open tick ends, what it and those before it used may be needed again at once, or never:
 * nobody can tell, and nothing runs later that could decide. So it goes back, but at a price that is
 * known: a page that goes and comes again takes 2 us (measured: 0.3 to go, 1.7 to 2.3 to come, on a
 * virtual machine; 16 pages in one call as much as 5 alone). That is paid from 1/32 of the time that
 * passed since the last such moment. A busy loop gives back a part each time, and is 3 % slower at the
 * most; one that waits between its ticks gives back all. The first KEPT spans stay, so that small ticks
 * make no system call.
 *
 * What it is worth (benchmarks/objects.py, 600 ticks of some 2.5 MB in 4 threads): resting memory of
 * 59 MB instead of 68, of which 4.5 are free spans and 4.3 the pages between blocks that escaped.
 */
#include "objects.h"

#include <time.h>

enum {
    WINDOW = 10,
    IDLE = 16,  /* spans that are freed while no tick is open count as an end */
    KEPT = 16,
    SHARE = 32,
    PAGE_NS = 2000,
    CALL_PAGES = 2, /* what a call costs beside its pages, in pages */
    MOST_PAGES = 16384
};

_Static_assert(3 * WINDOW <= 32, "a spike is forgotten within 32 ticks");

static struct {
    unsigned ends;
    uint32_t low, low_last; /* the fewest dirty spans of this window, and what was left of the last */
    uint64_t then;          /* ns: when no tick was open the last time */
    uint64_t credit;        /* ns */
} retention;

static uint32_t lesser(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* The number of spans that hold memory in vain has become this. */
void arena__retention_seen(uint32_t dirty) {
    if (dirty < retention.low) retention.low = dirty;
}

static void end_window(void) {
    uint32_t idle = lesser(retention.low, retention.low_last);
    retention.ends = 0;
    retention.low_last = retention.low - idle;
    if (idle) (void)arena__spans_trim(arena__region.dirty_count - idle);
    retention.low = arena__region.dirty_count;
}

static uint64_t now(void) {
    struct timespec time;
    if (clock_gettime(CLOCK_MONOTONIC, &time) != 0) return retention.then;
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void pay(uint64_t pages) {
    uint64_t price = pages * PAGE_NS;
    retention.credit -= price < retention.credit ? price : retention.credit;
}

static void give_back_what_is_paid(void) {
    uint64_t time = now(), most = (uint64_t)MOST_PAGES * PAGE_NS;
    retention.credit += (time - retention.then) / SHARE;
    retention.then = time;
    if (retention.credit > most) retention.credit = most;
    uint32_t pages_of_span = (uint32_t)(ARENA__SPAN / 4096);
    uint64_t spans = retention.credit / PAGE_NS / pages_of_span;
    uint32_t dirty = arena__region.dirty_count;
    if (dirty > KEPT && spans) {
        uint32_t some = lesser(dirty - KEPT, (uint32_t)spans);
        pay(arena__spans_trim(dirty - some) / 4096 + CALL_PAGES);
    }
    pay(arena__heap_rest(retention.credit / PAGE_NS, CALL_PAGES));
}

/* A tick has ended, and was the last open one if it is `quiet` now. */
void arena__retention_end(bool quiet) {
    if (quiet) give_back_what_is_paid();
    if (++retention.ends >= WINDOW) end_window();
}

/* Spans were freed while no tick was open: by what had escaped. */
void arena__retention_idle(uint32_t spans) {
    static uint32_t freed;
    freed += spans;
    if (freed < IDLE) return;
    freed = 0;
    end_window();
}
