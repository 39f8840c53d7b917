/* internal.h: what the core's files and the Python types share. Nothing outside csrc includes it.
 *
 * Three structures carry everything: a chunk (pages that a tick owns), a tick (a bump pointer into
 * its newest chunk, and what it may still ask for), and the thread's own record.
 */
#ifndef ARENA_INTERNAL_H
#define ARENA_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* mremap, strnlen */
#endif

#include "arena.h"
#include "checkers.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define ARENA__ALIGN ((size_t)16)
#define ARENA__CHUNK_MIN ((size_t)64 << 10)
#define ARENA__CLASSES 7 /* 64 KiB << 0 .. 6: up to 4 MiB; larger requests are oversize */
#define ARENA__CHUNK_MAX (ARENA__CHUNK_MIN << (ARENA__CLASSES - 1))
#define ARENA__OVERSIZE 255
#define ARENA__HUGE ((size_t)2 << 20) /* a huge page, where there are any */
#define ARENA__POOLS 16 /* the process's, and those of names with a policy of their own */
#define ARENA__SLICE 64 /* chunks that a trim takes at a time */
#define ARENA__WINDOW 10 /* ticks: see pages.c on retention */
_Static_assert(ARENA__WINDOW == ARENA_EXPORT_EVERY, "a window's end updates what is exported");

/* "No limit": so large that no sum of two sizes below it can overflow. */
#define ARENA__UNLIMITED (SIZE_MAX / 4)

/* What other threads may read at any time is atomic, and relaxed: none of it guards other memory. */
#define ARENA__LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define ARENA__STORE(x, v) atomic_store_explicit(&(x), (v), memory_order_relaxed)
#define ARENA__ADD(x, v) atomic_fetch_add_explicit(&(x), (v), memory_order_relaxed)
#define ARENA__SUB(x, v) atomic_fetch_sub_explicit(&(x), (v), memory_order_relaxed)

#define ARENA__LIKELY(x) __builtin_expect(!!(x), 1)
#define ARENA__UNLIKELY(x) __builtin_expect(!!(x), 0)
#define ARENA__NOINLINE __attribute__((noinline, cold))

/* A chunk's header lies at the start of its own mapping (but see `lead`). */
typedef struct arena__chunk {
    struct arena__chunk *next; /* in the tick's list, newest first; in a cache list; in a batch */
    struct arena__chunk *prev; /* in the tick's list only */
    size_t size;               /* of the whole mapping */
    size_t dirty;              /* bytes from the start that an earlier use may have written */
    size_t extent;             /* bytes from the start that this use has handed out */
    size_t pins;               /* live views into it; guarded by the pages lock */
    struct arena__group *group; /* of an orphan: where it is counted, or NULL */
    uint16_t lead;             /* bytes of its mapping before this header, when it is guarded */
    uint8_t klass;             /* size class, or ARENA__OVERSIZE */
    uint8_t pool;          /* where it goes back to */
    bool alone;                /* holds one allocation, which may grow to the chunk's end */
    bool orphan;               /* its tick has ended; the last view frees it */
    bool wipe;                 /* an orphan of a tick that is to be zeroed */
    bool guarded;              /* a page that faults lies behind it: see arena_debug */
} arena__chunk;

#define ARENA__HEAD ((sizeof(arena__chunk) + ARENA__ALIGN - 1) & ~(ARENA__ALIGN - 1))

_Static_assert(ARENA__HEAD <= 64, "a chunk's header is one cache line");
_Static_assert((ARENA__CHUNK_MIN & (ARENA__CHUNK_MIN - 1)) == 0, "classes are powers of two");

typedef struct arena__cleanup {
    struct arena__cleanup *next;
    arena_cleanup_fn fn;
    void *arg;
} arena__cleanup;

/* ENDED and KEPT are both over; the memory of a tick that an audit keeps can still be used. */
enum { ARENA__ENDED = 0, ARENA__KEPT = 1, ARENA__OPEN = 2, ARENA__ENDING = 3 };

struct arena_tick {
    /* The hot line. A tick that is not open has pos == end and room == 0, so that the fast path
     * needs no check of the state; so has one that is strict, for another reason: see limit.c. */
    char *pos;
    char *end;
    _Atomic size_t room; /* bytes that may be asked for without asking anybody: top - used */
    _Atomic size_t top;
    arena__chunk *current; /* the chunk that pos and end point into */
    arena__chunk *chunks;  /* all of them, newest first */
    size_t grown;          /* decides the class of the next chunk: see alloc.c */
    _Atomic uint64_t owner; /* arena__self.id of the thread that began it, or ARENA__ANYONE */
    uint64_t number;        /* 1, 2, 3, ... in the order of begins in the process */
    arena__cleanup *cleanups;
    arena_tick *below;     /* the tick around it; also the free list of records */
    arena_tick *open_next; /* list of the ticks that hold chunks; guarded by the pages lock */
    arena_tick **open_prev;
    size_t cap;    /* its own limit */
    size_t nested; /* bytes that ticks inside of it hold, for as long as it is open */
    _Atomic uint8_t state;
    bool strict;   /* each request is decided in limit.c: room stays 0 */
    bool inside;   /* a tick around it has a limit */
    bool wipe;     /* its memory is zeroed at the end */
    bool detached; /* not on a C stack: the Python types keep their own order */
    uint8_t depth; /* frames of a site that are recorded; 0: none */
    uint8_t pool;  /* where its chunks come from */
    uint32_t named;      /* while sites are recorded: the number of its name, */
    uint32_t begun, over; /* and the sites of its begin and its end */
    struct arena__log *log; /* where its pieces come from: see audit.c */
    struct arena__group *group; /* of a request: see below. NULL: of all other ticks */
    char name[32];
};

/* The requests of one registry of the Python types. Their ticks are no thread's (the GIL orders the
 * calls), are never current, and have all that is larger than the smallest chunk in mappings of its
 * own, which go back to the system at the end. They are counted here, and have a limit in common:
 * `around` stands for a tick around them, and is nothing else. */
#define ARENA__ANYONE UINT64_MAX
typedef struct arena__group {
    arena_tick around; /* first: a pointer to it is one to the group */
    size_t pinned; /* bytes of chunks that outlive their request; guarded by the pages lock */
    uint64_t pinned_count;
} arena__group;

/* A view into a chunk, by whoever recorded it. */
typedef struct arena__view {
    arena__chunk *chunk;
    struct arena__view *next;
    size_t size;  /* of the chunk, when it is held by this view */
    uint32_t at;  /* the site */
    uint32_t row; /* once its tick has ended */
} arena__view;

struct arena_strbuf {
    arena_tick *tick; /* NULL: the data is persisted memory */
    char *data;       /* NULL until something is written; else NUL-terminated */
    size_t len;
    size_t cap;          /* without the NUL */
    arena__chunk *chunk; /* where the data lies; NULL for persisted memory */
    bool stray;          /* persisted memory that nobody asked to persist */
    uint32_t row;        /* of the map of escapes, for persisted memory */
};

/* What a thread knows about itself. `id` is never reused, unlike a pthread_t. */
typedef struct arena__thread {
    uint64_t id;
    arena_tick *top;  /* innermost tick of the C stack */
    arena_tick *free; /* records for the next begins */
    uint64_t open;    /* ticks of it that are open */
    int error;        /* code of the last failure */
    bool registered;  /* its end will be noticed */
    arena_frame at;   /* where the macro form of the API says that the caller is */
    struct {          /* whose limit the last ARENA_E_LIMIT was of */
        const arena_tick *by; /* NULL: the process's */
        size_t size;
        size_t used;
        size_t limit;
    } refusal;
} arena__thread;

/* initial-exec: one instruction to reach; some 100 bytes fit the spare that glibc keeps for dlopen.
 * musl keeps none, and refuses to load such a module. */
#if defined(__GLIBC__)
#define ARENA__TLS __attribute__((tls_model("initial-exec")))
#else
#define ARENA__TLS
#endif
extern _Thread_local arena__thread arena__self ARENA__TLS;

uint64_t arena__name_thread(void);

static inline uint64_t arena__tid(void) {
    uint64_t id = arena__self.id;
    return ARENA__LIKELY(id != 0) ? id : arena__name_thread();
}

/* Records why a call fails; returns the code. */
static inline int arena__fail(int code) {
    arena__self.error = code;
    return code;
}

/* The operating system, behind a few functions so that a test can supply its own. `map` returns
 * zeroed pages or NULL; `remap` may move, keeps the old mapping on failure, and may be refused;
 * `seal` makes pages inaccessible for good and gives their memory back, or fails; `resize` and
 * `release` are realloc and free. */
typedef struct arena__os {
    void *(*map)(size_t size);
    void (*unmap)(void *start, size_t size);
    void *(*remap)(void *start, size_t old_size, size_t size);
    bool (*seal)(void *start, size_t size);
    void *(*resize)(void *old, size_t size);
    void (*release)(void *old);
} arena__os;
extern arena__os arena__system;

/* pages.c */
arena__chunk *arena__chunk_get(arena_tick *tick, size_t need, bool alone);
void arena__chunk_drop(arena_tick *tick, arena__chunk *chunk);
arena__chunk *arena__chunk_resize(arena_tick *tick, arena__chunk *chunk, size_t need);
size_t arena__chunks_return(arena_tick *tick);
void arena__sweep(uint64_t owner, bool others);
void arena__close_foreign(arena_tick *tick);
void arena__each_open(bool detached_too, void (*fn)(arena_tick *tick));
void arena__retention_roll(void);
size_t arena__chunks_keep(arena_tick *tick);
void arena__chunks_release(arena_tick *tick);
void arena__chunks_discard(arena__chunk *batch);
void arena__pages_unmap(void *start, size_t size);
void arena__span_of(arena__chunk *chunk, char **start, size_t *size);
size_t arena__quarantined(void);
void arena__quarantine_add(size_t size);
void arena__quarantine_sub(size_t size);
void arena__pin(arena__chunk *chunk);
void arena__unpin(arena__chunk *chunk);
void arena__pages_stats(arena_stats *out);
size_t arena__chunks_trim(size_t keep, uint64_t deadline);
size_t arena__cached(void);
extern _Atomic unsigned arena__named_pools; /* of names with a policy of their own */
uint8_t arena__pool_of(const char *name);
void arena__lock(void);
void arena__unlock(void);

/* tick.c */
void arena__tick_open(arena_tick *tick, arena_tick *around);
void arena__group_init(arena__group *group, size_t limit);
void arena__group_open(arena_tick *tick, arena__group *group);
void arena__tick_ending(arena_tick *tick);
size_t arena__tick_close(arena_tick *tick);
size_t arena__tick_keep(arena_tick *tick);
void arena__tick_release(arena_tick *tick);
void arena__tick_taken(arena_tick *tick);
uint64_t arena__ticks_begun(void);
bool arena__tick_left_behind(const arena_tick *tick);
arena_tick *arena__pick(arena_tick *tick);
void arena__tick_stats(arena_stats *out);
void arena__ticks_forked(void);

/* Asked for the current tick when C has none newer: the Python types answer from their context
 * variable. NULL when nobody is there to ask. */
extern arena_tick *(*arena__outer_current)(void);

static inline size_t arena__used(const arena_tick *tick) {
    return ARENA__LOAD(tick->top) - ARENA__LOAD(tick->room);
}

static inline uint8_t arena__state(const arena_tick *tick) {
    return ARENA__LOAD(tick->state);
}

/* Its end has been, whether its memory is gone or kept. */
static inline bool arena__is_over(const arena_tick *tick) {
    return arena__state(tick) <= ARENA__KEPT;
}

/* limit.c. A claim counts `size` bytes as asked for, or fails with a code and counts nothing. */
int arena__may_change(const arena_tick *tick);
int arena__claim(arena_tick *tick, size_t size);
void arena__refund(arena_tick *tick, size_t size);
void arena__settle(arena_tick *tick);
void arena__settle_held(const arena_tick *tick);
void arena__set_room(arena_tick *tick, size_t top, size_t room);
void arena__make_strict(arena_tick *tick);
int arena__cap(arena_tick *tick, size_t bytes);
int arena__claim_persist(size_t size);
void arena__refund_persist(size_t size);
void arena__held_forked(size_t strict);
int arena__process_limit(size_t bytes, bool detached_too);
void arena__limit_stats(arena_stats *out);
extern _Atomic bool arena__counting;

/* Counts bytes that fit the room. */
static inline void arena__charge(arena_tick *tick, size_t size) {
    ARENA__STORE(tick->room, ARENA__LOAD(tick->room) - size);
}

/* export.c */
void arena__export_update(uint64_t ended);
void arena__export_forked(void);

/* trim.c. A reader of the heap's figures begins, unless a trim runs, and then ends. */
typedef struct arena__allocator { /* what is behind malloc. A test may supply its own */
    int kind;          /* ARENA_HEAP_* */
    int (*walk)(void); /* gives back what is free; returns what the allocator says */
} arena__allocator;
arena__allocator *arena__allocator_here(void);
bool arena__sample_begin(void);
void arena__sample_end(void);
void arena__trim_forking(void);
void arena__trim_forked(bool child);
unsigned arena__trim_waiting(void);
uint64_t arena__now_ns(void);

void *arena__beside_malloc(const char *name);

/* heap.c: the C heap's own figures, in bytes. */
#define ARENA__UNKNOWN UINT64_MAX
typedef struct arena__figures {
    int backend; /* ARENA_HEAP_* */
    bool wraps;  /* they are of 32 bits each */
    uint64_t held;    /* taken from the system */
    uint64_t used;    /* by whoever allocated */
    uint64_t free;    /* inside the allocator */
    uint64_t top;     /* of it, at the end of the main heap */
    uint64_t mmapped; /* of what is used, in mappings of its own */
    uint64_t pieces;  /* that are free */
} arena__figures;
bool arena__heap_figures(arena__figures *out);
bool arena__heap_count(uint64_t *count);
bool arena__heap_set(int option, int value);

/* The calls behind them, by their own names. A test may supply its own. The structs are glibc's and
 * macOS's, so that what was built with an older library runs with a newer one, and the other way. */
typedef struct arena__mallinfo2 {
    size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
} arena__mallinfo2;
typedef struct arena__mallinfo {
    int arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
} arena__mallinfo;
struct arena__zone_statistics {
    unsigned blocks_in_use;
    size_t size_in_use, max_size_in_use, size_allocated;
};
typedef struct arena__heap_calls {
    int kind; /* ARENA_HEAP_* */
    arena__mallinfo2 (*mallinfo2)(void);
    arena__mallinfo (*mallinfo)(void);
    int (*malloc_info)(int options, FILE *file);
    int (*mallopt)(int option, int value);
    int (*mallctl)(const char *name, void *old, size_t *old_size, void *new, size_t new_size);
    void (*mi_process_info)(size_t *elapsed, size_t *user, size_t *system, size_t *resident,
                            size_t *most_resident, size_t *committed, size_t *most_committed,
                            size_t *faults);
    void (*malloc_zone_statistics)(void *zone, struct arena__zone_statistics *out);
} arena__heap_calls;
arena__heap_calls *arena__heap_here(void);

/* alloc.c */
void *arena__take(arena_tick *tick, size_t size, arena__chunk **chunk);
void *arena__alloc_slow(arena_tick *tick, size_t size, arena__chunk **chunk);
bool arena__extend(arena_tick *tick, arena__chunk *chunk, void *data, size_t old_size, size_t size);
void arena__zero(arena__chunk *chunk, void *data, size_t size);

static inline size_t arena__round(size_t size) {
    return (size + (ARENA__ALIGN - 1)) & ~(ARENA__ALIGN - 1);
}

/* The fast path: two compares and three moves. `span - 1` sends a size of 0 to the slow path; a
 * size that would overflow when rounded is larger than any room. */
static inline void *arena__alloc_in(arena_tick *tick, size_t size, arena__chunk **chunk) {
    size_t room = ARENA__LOAD(tick->room);
    size_t span = arena__round(size);
    char *data = tick->pos;
    if (ARENA__LIKELY(size <= room && span - 1 < (size_t)(tick->end - data))) {
        tick->pos = data + span;
        ARENA__STORE(tick->room, room - size);
        *chunk = tick->current;
        return data;
    }
    return arena__alloc_slow(tick, size, chunk);
}

/* strbuf.c */
void arena__strbuf_init(arena_strbuf *buf, arena_tick *tick);
int arena__strbuf_grow(arena_strbuf *buf, size_t extra);
int arena__strbuf_append_slow(arena_strbuf *buf, const void *data, size_t size);
void arena__strbuf_free(arena_strbuf *buf);

/* memcpy for what a loop appends. From 16 to 64 bytes by four moves that overlap as they must,
 * with no branch on the size: sizes in a loop vary, and a branch on them is guessed wrong. */
static inline void arena__copy(char *to, const char *from, size_t size) {
    if (size - 16 <= 48) {
        size_t last = size - 16, second = last < 16 ? last : 16, third = last - second;
        char a[16], b[16], c[16], d[16];
        memcpy(a, from, 16), memcpy(b, from + second, 16);
        memcpy(c, from + third, 16), memcpy(d, from + last, 16);
        memcpy(to, a, 16), memcpy(to + second, b, 16);
        memcpy(to + third, c, 16), memcpy(to + last, d, 16);
    } else if (size - 8 <= 8) {
        uint64_t head, tail;
        memcpy(&head, from, 8), memcpy(&tail, from + size - 8, 8);
        memcpy(to, &head, 8), memcpy(to + size - 8, &tail, 8);
    } else {
        memcpy(to, from, size);
    }
}

/* The fast path of an append: the bytes fit the capacity and the limit. No bytes go the slow way,
 * which looks at the state. */
static inline int arena__strbuf_append(arena_strbuf *buf, const void *data, size_t size) {
    if (ARENA__LIKELY(size - 1 < buf->cap - buf->len && buf->tick && size <= ARENA__LOAD(buf->tick->room)
                      && buf->data)) {
        char *at = buf->data + buf->len;
        arena__copy(at, data, size);
        at[size] = '\0';
        buf->len += size;
        arena__charge(buf->tick, size);
        return ARENA_OK;
    }
    return arena__strbuf_append_slow(buf, data, size);
}

/* sites.c. arena__tracing is not 0 while anybody records sites. */
#define ARENA__DEPTH 32
enum {
    ARENA_ESCAPE_PERSIST = 1,
    ARENA_ESCAPE_PIN,
    ARENA_ESCAPE_STALE,
    ARENA_ESCAPE_STRAY,
    ARENA_ESCAPE_OBJECT
};
extern _Atomic int arena__tracing;
extern uint32_t (*arena__site_outer)(void); /* who knows of callers that are not in C */
void arena__sites_lock(void);
void arena__sites_unlock(void);
uint32_t arena__site_find(const uintptr_t *key, uint32_t words);
uint32_t arena__site_add(const uintptr_t *key, uint32_t words, const arena_frame *frames,
                         uint32_t depth);
uint32_t arena__site_frames(uint32_t number, const arena_frame **frames);
uint32_t arena__site_here(void);
uint32_t arena__name_turn(const char *text);
uint32_t arena__row_add(int kind, uint32_t at, const arena_tick *tick, size_t size);
void arena__row_sub(uint32_t number, size_t size);
void arena__row_resize(uint32_t number, size_t old_size, size_t size);
uint32_t arena__row_use(uint32_t at, uint32_t used, const arena_tick *tick);
bool arena__row_wants_example(uint32_t number);
void arena__row_example(uint32_t number, const char *text, size_t size);
uint32_t arena__escaped(int kind, size_t size);
arena__view *arena__view_add(arena__chunk *chunk, uint32_t at);
void arena__view_gone(arena__view *view);
void arena__views_escaped(const arena_tick *tick, const arena__chunk *chunk);
int arena__trace_hold(void);
void arena__trace_drop(void);
static inline bool arena__traced(void) {
    return ARENA__UNLIKELY(ARENA__LOAD(arena__tracing) != 0);
}

/* audit.c */
extern _Atomic size_t arena__budget;
void arena__log(arena_tick *tick, const void *data, size_t size);
void arena__log_drop(arena_tick *tick);
void arena__bury(arena_tick *tick, arena__chunk *chunks);
void arena__audit_drain(void);
void arena__audit_forking(void);
void arena__audit_forked(void);

/* debug.c */
extern _Atomic int arena__debug_flags;
#define ARENA__FILL 0xDD

/* persist.c */
enum { ARENA__PERSIST = 1, ARENA__STRAY = 2 };
void *arena__persist_new(size_t size, bool stray);
void *arena__persist_part(size_t size, bool stray, uint32_t row);
void *arena__persist_resize(void *old, size_t size);
arena_strbuf *arena__persist_strbuf(size_t capacity, bool stray);
uint32_t arena__persist_row(const void *persisted);
void arena__persist_stats(arena_stats *out);

#endif
