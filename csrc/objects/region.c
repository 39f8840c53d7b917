/* region.c: one reserved range of addresses, and which of its spans are free.
 *
 * One range, so that "is this block ours?" is a subtraction and a compare, in every free of the
 * process. It is reserved without access rights, which costs no memory and counts against no limit
 * but that of addresses; what is needed of it is made accessible from the bottom up.
 *
 * Free spans are found lowest address first, those that still hold memory before untouched ones. So
 * what is in use stays dense at the bottom, and what goes back goes from the top.
 */
#include "objects.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

arena__pool arena__region;

enum {
    STEP = 64,   /* spans that are made accessible at once, for pages of 4 KiB */
    MAPPED = 512 /* 32 MiB: the most that glibc's threshold for mappings of their own may rise to */
};
_Static_assert(MAPPED * ARENA__SPAN == (size_t)32 << 20, "as glibc's DEFAULT_MMAP_THRESHOLD_MAX");

static struct {
    uint32_t step;
    uint32_t clean_from; /* no span below it is free */
    uint32_t dirty_from; /* no span below it is dirty */
} pool;

/* How many bytes of addresses to ask for first: a quarter of what the process may have. */
static size_t ask(void) {
    struct rlimit limit;
    size_t most = sizeof(void *) < 8 ? (size_t)256 << 20 : (size_t)1 << 36;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        while (most > limit.rlim_cur / 4) most /= 2;
    return most;
}

static size_t in_pages(size_t size, size_t page) {
    return (size + page - 1) / page * page;
}

/* The range holds, one after the other: the spans, what is known of each, notes, maps. `maps` more
 * maps, a bit for each span, are the caller's. */
bool arena__region_reserve(size_t maps, uint64_t **map) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (arena__region.size) return true;
    for (size_t size = ask(); size >= (size_t)16 << 20; size /= 2) {
        size_t count = size >> ARENA__SPAN_SHIFT;
        size_t spans = in_pages(count * sizeof(arena__span), page);
        size_t notes = in_pages(count * ARENA__NOTES * sizeof(arena__note), page);
        size_t one_map = in_pages((count + 7) / 8, sizeof(uint64_t));
        size_t all_maps = in_pages((maps + 2) * one_map, page);
        size_t whole = ARENA__SPAN + size + spans + notes + all_maps;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        char *start = mmap(NULL, whole, PROT_NONE, flags, -1, 0);
        if (start == MAP_FAILED) continue;
        /* Where the system uses huge pages unasked, it would fill the gaps that are given back. */
        (void)madvise(start, whole, MADV_NOHUGEPAGE);
        char *base = (char *)(((uintptr_t)start + ARENA__SPAN - 1) & ~(ARENA__SPAN - 1));
        char *first_map = base + size + spans + notes;
        if (mprotect(first_map, all_maps, PROT_READ | PROT_WRITE) != 0) {
            (void)munmap(start, whole);
            continue;
        }
        pool.step = (uint32_t)(STEP * (page > 4096 ? page / 4096 : 1));
        arena__region.spans = (arena__span *)(void *)(base + size);
        arena__region.notes = (arena__note *)(void *)(base + size + spans);
        arena__region.used = (uint64_t *)(void *)first_map;
        arena__region.dirty = (uint64_t *)(void *)(first_map + one_map);
        for (size_t i = 0; i < maps; i++)
            map[i] = (uint64_t *)(void *)(first_map + (i + 2) * one_map);
        arena__region.count = (uint32_t)count;
        arena__region.base = (uintptr_t)base;
        arena__region.size = size;
        return true;
    }
    return false;
}

static bool commit(uint32_t count) {
    uint32_t from = arena__region.committed;
    if (count <= from) return true;
    uint32_t to = (count + pool.step - 1) / pool.step * pool.step;
    if (to > arena__region.count) to = arena__region.count;
    size_t more = to - from;
    int rights = PROT_READ | PROT_WRITE;
    if (mprotect(arena__region.spans + from, more * sizeof(arena__span), rights) != 0 ||
        mprotect(arena__region.notes + (size_t)from * ARENA__NOTES,
                 more * ARENA__NOTES * sizeof(arena__note), rights) != 0 ||
        mprotect(arena__span_start(from), more << ARENA__SPAN_SHIFT, rights) != 0)
        return false;
    arena__region.committed = to;
    return true;
}

/* The first bit from `from` on that is set; `end` when there is none before it. */
uint32_t arena__next_one(const uint64_t *map, uint32_t from, uint32_t end) {
    if (from >= end) return end;
    uint32_t at = from >> 6, last = (end - 1) >> 6;
    uint64_t word = map[at] & (~(uint64_t)0 << (from & 63));
    while (!word && at < last) word = map[++at];
    if (!word) return end;
    uint32_t found = (at << 6) + (uint32_t)__builtin_ctzll(word);
    return found < end ? found : end;
}

uint32_t arena__next_zero(const uint64_t *map, uint32_t from, uint32_t end) {
    if (from >= end) return end;
    uint32_t at = from >> 6, last = (end - 1) >> 6;
    uint64_t word = ~map[at] & (~(uint64_t)0 << (from & 63));
    while (!word && at < last) word = ~map[++at];
    if (!word) return end;
    uint32_t found = (at << 6) + (uint32_t)__builtin_ctzll(word);
    return found < end ? found : end;
}

/* Sets or clears `count` bits; returns how many were set before. */
static uint32_t mark(uint64_t *map, uint32_t first, uint32_t count, bool set) {
    uint32_t before = 0;
    while (count) {
        uint32_t bit = first & 63, here = 64 - bit < count ? 64 - bit : count;
        uint64_t mask = (here == 64 ? ~(uint64_t)0 : ((uint64_t)1 << here) - 1) << bit;
        uint64_t *word = &map[first >> 6];
        before += (uint32_t)__builtin_popcountll(*word & mask);
        *word = set ? *word | mask : *word & ~mask;
        first += here;
        count -= here;
    }
    return before;
}

/* Spans that are free are in use from now on. True when none of them held memory. */
static bool enter_use(uint32_t first, uint32_t count) {
    uint32_t dirty = mark(arena__region.dirty, first, count, false);
    (void)mark(arena__region.used, first, count, true);
    arena__region.in_use += count;
    arena__region.dirty_count -= dirty;
    arena__retention_seen(arena__region.dirty_count);
    return dirty == 0;
}

static uint32_t find_one(void) {
    if (arena__region.dirty_count) {
        uint32_t at = arena__next_one(arena__region.dirty, pool.dirty_from, arena__region.committed);
        pool.dirty_from = at + 1;
        return at;
    }
    uint32_t at = arena__next_zero(arena__region.used, pool.clean_from, arena__region.count);
    pool.clean_from = at; /* not at + 1: it may be that it cannot be had */
    return at < arena__region.count ? at : ARENA__NONE;
}

/* First fit by address. */
static uint32_t find_run(uint32_t count) {
    uint32_t at = pool.clean_from, end = arena__region.count;
    for (;;) {
        at = arena__next_zero(arena__region.used, at, end);
        if (count > end - at) return ARENA__NONE;
        uint32_t busy = arena__next_one(arena__region.used, at, at + count);
        if (busy == at + count) return at;
        at = busy + 1;
    }
}

/* Spans that follow one another; ARENA__NONE when there are none. */
uint32_t arena__spans_take(uint32_t count, bool *clean) {
    uint32_t at = count == 1 ? find_one() : find_run(count);
    if (at == ARENA__NONE || !commit(at + count)) return ARENA__NONE;
    *clean = enter_use(at, count);
    return at;
}

/* A run becomes longer where it lies, when what follows it is free. */
bool arena__spans_extend(uint32_t first, uint32_t count, uint32_t more, bool *clean) {
    uint32_t from = first + count;
    if (more > arena__region.count - from) return false;
    if (arena__next_one(arena__region.used, from, from + more) != from + more) return false;
    if (!commit(from + more)) return false;
    *clean = enter_use(from, more);
    return true;
}

/* Gives the memory of spans back, which then read as zeros. False when the system does not take it, as
 * under mlockall(). */
bool arena__spans_blank(uint32_t first, uint32_t count) {
    size_t size = (size_t)count << ARENA__SPAN_SHIFT;
    if (madvise(arena__span_start(first), size, MADV_DONTNEED) != 0) return false;
    arena__region.given_back += size;
    return true;
}

/* Spans are free from now on; `dirty` when they hold memory. A run as large as what glibc always maps
 * and unmaps does not stay: parsers ask for ten times the size of a document and touch a part of it, and
 * with documents of all sizes the parts add up (126 MB after bodies of 12 MB by orjson). */
void arena__spans_put(uint32_t first, uint32_t count, bool dirty) {
    if (dirty && count >= MAPPED && arena__spans_blank(first, count)) dirty = false;
    (void)mark(arena__region.used, first, count, false);
    arena__region.in_use -= count;
    if (first < pool.clean_from) pool.clean_from = first;
    if (!dirty) return;
    (void)mark(arena__region.dirty, first, count, true);
    arena__region.dirty_count += count;
    if (first < pool.dirty_from) pool.dirty_from = first;
    if (!arena__captures_open()) arena__retention_idle(count);
}

/* Gives the memory of free spans back, highest first, until `keep` hold some. Returns bytes. */
size_t arena__spans_trim(uint32_t keep) {
    uint32_t left = arena__region.dirty_count, at = arena__region.committed, given = 0;
    while (left > keep) {
        uint64_t word = arena__region.dirty[--at >> 6];
        if (!(word >> (at & 63) & 1)) {
            if (!word) at &= ~(uint32_t)63;
            continue;
        }
        uint32_t end = at + 1;
        while (at && left - (end - at) > keep &&
               (arena__region.dirty[(at - 1) >> 6] >> ((at - 1) & 63) & 1))
            at--;
        if (!arena__spans_blank(at, end - at)) break;
        (void)mark(arena__region.dirty, at, end - at, false);
        left -= end - at;
        given += end - at;
    }
    arena__region.dirty_count = left;
    arena__retention_seen(left);
    return (size_t)given << ARENA__SPAN_SHIFT;
}
