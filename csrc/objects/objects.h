/* objects.h: what the files of the objects module share. Nothing outside csrc/objects includes it.
 *
 * The module puts Python's own blocks, those above 512 bytes that are asked for while a tick with
 * objects=True is open, into a region of its own. From the bottom up:
 *
 *   region.c    one reserved range of addresses, cut into spans of 64 KiB; which of them are free
 *   retention.c when the memory of free spans goes back to the system
 *   heap.c      blocks in spans: size classes, runs of spans for what is larger, and a note on each
 *               block that says which tick it is of
 *   capture.c   a tick: which one captures on this thread, and what is left of it at its end
 *   example.c   a text that shows what a block is, from its own bytes alone
 *   hooks.c     between CPython's allocators and all this
 *   numpy.c     the same for the data of NumPy's arrays
 *   connect.c   the tables of link.h, and what cffi exposes
 *
 * There is no lock: everything runs under the GIL, for CPython calls these allocators with it alone.
 */
#ifndef ARENA_OBJECTS_H
#define ARENA_OBJECTS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

/* Python.h first, as it wants to be. */
#include <Python.h>

#include "../checkers.h"
#include "link.h"
#include "register.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ARENA__LIKELY(x) __builtin_expect(!!(x), 1)
#define ARENA__UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Blocks up to this size stay where they are: pymalloc's. */
#define ARENA__SMALL ((size_t)512)
#define ARENA__SPAN_SHIFT 16
#define ARENA__SPAN ((size_t)1 << ARENA__SPAN_SHIFT)
#define ARENA__NOTES 128 /* of a span; the smallest class has 124 blocks */
#define ARENA__NONE UINT32_MAX

/* What is known about a block. `tag` is the capture that it is of, and `site` where it was asked for;
 * when the tag is 0 the block has escaped, and `site` is its row in the host's map. */
typedef struct arena__note {
    uint32_t site;
    uint16_t tag;
    uint16_t slack; /* bytes of the slot that were not asked for; unused for runs */
} arena__note;

enum { ARENA__FREE = 0, ARENA__SLOTS = 1, ARENA__RUN = 2 };

/* A span of slots, or the first span of a run. The others of a run are ARENA__FREE here, and in use in
 * the map of the region. */
typedef struct arena__span {
    _Alignas(64) uint64_t free[2]; /* a bit for each slot */
    size_t size;                   /* of a slot; of the block, in a run */
    uint32_t count;                /* spans in the run */
    uint32_t magic;                /* divides by the size of a slot */
    uint32_t next, prev;           /* runs of the same capture */
    uint16_t live;
    uint16_t blank; /* pages whose memory was given back since their slots were used */
    uint8_t klass;
    uint8_t state;
} arena__span;

_Static_assert(sizeof(arena__span) == 64, "one cache line");
_Static_assert(sizeof(arena__note) == 8, "eight bytes for a block");

/* region.c */
typedef struct arena__pool {
    uintptr_t base; /* of span 0; with size 0 nothing is ours */
    size_t size;
    arena__span *spans;
    arena__note *notes;
    uint64_t *used;     /* a bit for each span that is in use */
    uint64_t *dirty;    /* a bit for each span that is free and holds memory */
    uint32_t count;     /* spans of the reservation */
    uint32_t committed; /* those that may be touched */
    uint32_t in_use;
    uint32_t dirty_count;
    uint64_t given_back; /* bytes, ever */
} arena__pool;
extern arena__pool arena__region;

bool arena__region_reserve(size_t maps, uint64_t **map);
uint32_t arena__spans_take(uint32_t count, bool *clean);
bool arena__spans_extend(uint32_t first, uint32_t count, uint32_t more, bool *clean);
void arena__spans_put(uint32_t first, uint32_t count, bool dirty);
bool arena__spans_blank(uint32_t first, uint32_t count);
size_t arena__spans_trim(uint32_t keep);
uint32_t arena__next_one(const uint64_t *map, uint32_t from, uint32_t end);
uint32_t arena__next_zero(const uint64_t *map, uint32_t from, uint32_t end);

static inline bool arena__ours(const void *block) {
    return (uintptr_t)block - arena__region.base < arena__region.size;
}

static inline char *arena__span_start(uint32_t at) {
    return (char *)arena__region.base + ((size_t)at << ARENA__SPAN_SHIFT);
}

/* retention.c */
void arena__retention_seen(uint32_t dirty);
void arena__retention_end(bool quiet);
void arena__retention_idle(uint32_t spans);

/* capture.c */
typedef struct arena__capture arena__capture;

/* A thread's captures; innermost first. Outlives the thread while captures are open. */
typedef struct arena__thread {
    arena__capture *current;
    _Atomic uint32_t holders; /* the thread itself, and its open captures */
} arena__thread;

struct arena__capture {
    const void *tick;
    arena__thread *thread;
    PyThreadState *state; /* of the begin: another interpreter may run on the same thread */
    arena__capture *below;
    uint64_t *seen; /* a bit for each span of slots that it took a slot of */
    uint32_t words; /* of that map */
    uint32_t low, high; /* its first word that is not 0, and one behind the last */
    uint32_t runs;  /* its first run */
    uint16_t tag;
    bool counted; /* among those that are open */
    size_t live;  /* blocks */
};

#if defined(__GLIBC__) /* see csrc/internal.h */
#define ARENA__TLS __attribute__((tls_model("initial-exec")))
#else
#define ARENA__TLS
#endif
extern _Thread_local arena__thread *arena__self ARENA__TLS;
extern arena__capture *arena__by_tag[1 << 16];
extern arena_link_host arena__host;

void *arena__capture_begin(const void *tick);
size_t arena__capture_end(void *capture);
bool arena__capture_widen(arena__capture *capture, uint32_t word);
size_t arena__captures_open(void);
void arena__captures_set_up(void);
uint32_t arena__site(const arena__capture *capture);

/* The capture that this thread's blocks go to now, or NULL. */
arena__capture *arena__capturing(void);

/* heap.c */
typedef struct arena__tally {
    size_t captured, captured_bytes; /* blocks of open ticks */
    size_t escaped, escaped_bytes;   /* blocks that have outlived theirs */
} arena__tally;
extern arena__tally arena__counted;

/* A block as it lies. */
typedef struct arena__place {
    arena__note *note;
    arena__span *span;
    uint32_t at;
    size_t size; /* asked for */
    size_t room; /* what it may become where it lies */
} arena__place;

bool arena__heap_set_up(void);
void *arena__block_new(arena__capture *capture, uint32_t site, size_t size, bool zero);
void arena__block_free(void *block);
bool arena__block_find(const void *block, arena__place *place);
bool arena__block_fit(void *block, const arena__place *place, size_t size);
void *arena__block_move(void *block, const arena__place *place, arena__capture *capture,
                        uint32_t site, size_t size);
size_t arena__blocks_escape(arena__capture *capture);
void arena__blocks_forget_rows(void);
size_t arena__heap_trim(void);
uint64_t arena__heap_rest(uint64_t pages, uint64_t per_call);

/* hooks.c */
bool arena__hooks_install(void);
void arena__hooks_check(void);
typedef void *(*arena__malloc)(void *ctx, size_t size);
void *arena__captured_new(size_t size, bool zero);
void *arena__ours_resize(void *block, size_t size, arena__malloc outside, void *ctx);

/* example.c */
size_t arena__example(const char *block, size_t size, char *text, size_t room);

/* numpy.c */
void arena__numpy_begin(void);

#endif
