/* arena.h: tick-scoped memory, the public C API.
 *
 * A tick is one scope: it begins, allocates, ends. All that it allocated (its scratch) goes at
 * the end in one step; what must live on is copied out by a `_persist` call and lives until
 * arena_free_persist.
 *
 * Contracts that hold for every function here:
 *  - A tick belongs to the thread that began it. Only that thread may allocate in it or end it;
 *    arena_end checks this, the allocating calls do not (it would cost more than the allocation).
 *    Persisted memory may be used and freed by any thread.
 *  - A NULL tick means the current one: the innermost open tick that arena_begin opened on this
 *    thread. With none open the allocation is a stray: it lives on like persisted memory, is
 *    counted, and may be freed with arena_free_persist.
 *  - A function that can fail returns NULL or a negative code; arena_error() then says which code.
 *    None prints, none aborts.
 *  - Sizes are bytes. A size of 0 is valid and gives a pointer that is unique while its tick is
 *    open. Memory is aligned to 16 bytes.
 *  - Using scratch after its tick has ended is undefined in C, as after free(). (The Python types
 *    check it.)
 *
 * The region between the two cdef marks is, to the letter, what the Python builder gives to cffi:
 * no attributes, macros with arguments or preprocessor lines in it.
 */
#ifndef ARENA_H
#define ARENA_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#define ARENA_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif

/* cdef begin */

typedef struct arena_tick arena_tick;
typedef struct arena_strbuf arena_strbuf;
typedef void (*arena_cleanup_fn)(void *arg);

enum {
    ARENA_OK = 0,
    ARENA_E_NOMEM = -1,   /* the operating system gave no memory */
    ARENA_E_LIMIT = -2,   /* a limit would be passed: the tick's, one's around it, the process's */
    ARENA_E_ENDED = -3,   /* no such tick is open: never begun, or ended already */
    ARENA_E_THREAD = -4,  /* the tick belongs to another thread */
    ARENA_E_ENDING = -5,  /* the tick's cleanups are running: it takes no more work */
    ARENA_E_INVALID = -6  /* an argument is out of range */
};

/* What arena_debug turns on. */
enum {
    ARENA_DEBUG_FILL = 1,    /* ended memory is overwritten with 0xDD */
    ARENA_DEBUG_NOREUSE = 2, /* ended memory is never used again, and stays readable */
    ARENA_DEBUG_GUARD = 4    /* ended memory cannot be touched; a page that faults ends oversize */
};

/* All sizes in bytes. `scratch` counts what callers asked for, `chunks` what was mapped for it. */
typedef struct arena_stats {
    uint64_t ticks_begun;      /* ever */
    uint64_t ticks_ended;      /* ever */
    uint64_t ticks_open;       /* now */
    uint64_t scratch;          /* asked for by open ticks, now */
    uint64_t scratch_peak;     /* the most that one tick had asked for at its end */
    uint64_t chunks;           /* mapped for open ticks, now (oversize included) */
    uint64_t chunks_peak;      /* the most of it at one time */
    uint64_t cached;           /* chunks kept for the next ticks, now */
    uint64_t high_water;       /* what the retention window says is needed */
    uint64_t pinned;           /* chunks that outlive their tick because a view lives, now */
    uint64_t pinned_count;     /* how many chunks that is */
    uint64_t pinned_ever;      /* chunks ever pinned past their tick */
    uint64_t persisted;        /* bytes asked for by persist calls, now */
    uint64_t persisted_count;  /* allocations, now */
    uint64_t persisted_peak;   /* the most of `persisted` at one time */
    uint64_t strays;           /* bytes of strays, now */
    uint64_t strays_count;     /* allocations, now */
    uint64_t strays_ever;      /* allocations, ever */
    uint64_t maps;             /* mappings asked of the operating system, ever */
    uint64_t unmaps;           /* mappings given back, ever */
    uint64_t retired;          /* bytes that the debug dial keeps out of use, ever */
    uint64_t limit;            /* of the process; UINT64_MAX: none */
    uint64_t quarantined;      /* chunks of ended ticks that an audit keeps, now */
} arena_stats;

/* Library. */
const char *arena_version(void);
const char *arena_strerror(int code);
int arena_error(void);
void arena_stats_get(arena_stats *out);

/* Gives cached chunks back to the operating system until at most `keep` bytes are cached.
 * Returns the bytes given back. In slices: no lock is held for long, and unmaps outside of any. */
size_t arena_trim(size_t keep);

/* Retention: which chunks of ended ticks stay cached for the next ones. ADAPTIVE: those that the last two
 * windows of 10 ends of ticks needed at their peak. ALL, NONE: all of them, none. BYTES: until so many
 * are cached, without forgetting them. Larger requests than 4 MiB have mappings of their own, which are
 * never kept. Sets it for the process (NULL or "" for `name`), or for the ticks of a name that begin from
 * now on: they have a cache of their own then. AS_PROCESS undoes that. Returns ARENA_OK;
 * ARENA_E_LIMIT when 15 names have one, ARENA_E_INVALID. */
enum {
    ARENA_RETAIN_ADAPTIVE = 0,
    ARENA_RETAIN_ALL = 1,
    ARENA_RETAIN_NONE = 2,
    ARENA_RETAIN_BYTES = 3,
    ARENA_RETAIN_AS_PROCESS = 4
};
int arena_retain(const char *name, int policy, size_t bytes);

/* What is retained: of the process first, then of each name with a policy. Fills at most `room` rows and
 * returns how many there are. */
typedef struct arena_retained {
    char name[32]; /* "": the process's */
    int policy;
    uint64_t most;   /* for ARENA_RETAIN_BYTES */
    uint64_t cached; /* bytes now */
    uint64_t needed; /* by the last two windows at their peak, whatever the policy */
} arena_retained;
size_t arena_retention(arena_retained *out, size_t room);

/* Ticks that have ended, ever: arena_stats.ticks_ended, without a look at all the rest. */
uint64_t arena_ticks_ended(void);

/* Lets others see that number from outside, within ARENA_EXPORT_EVERY ticks: as 16 bytes of a memfd named
 * "arena-ticks", which has an entry in /proc/PID/fd: "ARENAtk1" and the number as a uint64 of this
 * machine's order. It costs one file descriptor and one page. A child that is forked has one of its own.
 * ARENA_EXPORT=1 in the environment does it at the start. Returns ARENA_OK, also when it is done already;
 * ARENA_E_NOMEM when the system gives no descriptor, ARENA_E_INVALID where there are no memfds. */
enum { ARENA_EXPORT_EVERY = 10 };
int arena_export_ticks(void);

/* The most bytes that the process may hold, exact to the byte: what callers asked for in open ticks,
 * persisted memory and strays. SIZE_MAX lifts the limit. ARENA_E_INVALID when more is held already.
 * Ticks that are open in other threads come under it with their next chunk, all others at once. */
int arena_process_limit(size_t bytes);

/* The debug dial: sets which of ARENA_DEBUG_* are on for memory that goes from now on, and returns
 * those that were. NOREUSE and GUARD never give address space back, and GUARD maps memory in each
 * tick: they are for finding a bug. The environment variable ARENA_DEBUG ("fill,guard") sets the
 * start; arena_debug_words returns the flags of such a text, ARENA_E_INVALID when it is none.
 * "sites=8" in it has no flag: it is arena_trace(8). */
int arena_debug(int flags);
int arena_debug_now(void);
int arena_debug_words(const char *words);

/* Ticks. arena_begin makes the new tick current on this thread; `name` may be NULL and is copied
 * (31 bytes of it). arena_end runs the cleanups, last in first out, then gives the memory back; it
 * ends every tick that was begun inside first. A second end is ARENA_E_ENDED while the record of
 * the tick has not been reused for a later one. */
arena_tick *arena_begin(const char *name);
int arena_end(arena_tick *tick);
arena_tick *arena_current(void);
const char *arena_name(const arena_tick *tick);
uint64_t arena_number(const arena_tick *tick);
size_t arena_used(const arena_tick *tick);

/* The most bytes that the tick and those inside of it may hold, exact to the byte: what callers
 * asked for, a growing string by its length. SIZE_MAX lifts the limit. ARENA_E_INVALID when more is
 * in use already. */
int arena_limit(arena_tick *tick, size_t bytes);

/* Everything that the tick allocates is zeroed at its end: for secrets. Ticks that are begun inside
 * of it from now on are wiped, too. */
int arena_wipe(arena_tick *tick);

/* Calls fn(arg) when the tick ends. A cleanup may read the tick's memory; it may not allocate in
 * the tick (ARENA_E_ENDING) or end it. */
int arena_cleanup(arena_tick *tick, arena_cleanup_fn fn, void *arg);

/* Scratch. arena_alloc leaves the bytes undefined, arena_zalloc zeroes them. arena_realloc takes
 * the old size, grows in place where it can, and leaves the old block alone on failure. The string
 * calls add a NUL, which counts as an asked-for byte. */
void *arena_alloc(arena_tick *tick, size_t size);
void *arena_zalloc(arena_tick *tick, size_t size);
void *arena_realloc(arena_tick *tick, void *old, size_t old_size, size_t size);
void *arena_memdup(arena_tick *tick, const void *data, size_t size);
char *arena_strdup(arena_tick *tick, const char *text);
char *arena_strndup(arena_tick *tick, const char *text, size_t size);
char *arena_printf(arena_tick *tick, const char *format, ...);

/* Growing strings. A string grows in the tick that made it, whichever is current. The data is
 * NUL-terminated (the NUL is in no length and no limit) and moves when the string grows. What is
 * given to append and puts may lie inside the string itself, the arguments of printf may not. A
 * failed call leaves the string as it was. */
arena_strbuf *arena_strbuf_new(arena_tick *tick, size_t capacity);
int arena_strbuf_append(arena_strbuf *buf, const void *data, size_t size);
int arena_strbuf_puts(arena_strbuf *buf, const char *text);
int arena_strbuf_printf(arena_strbuf *buf, const char *format, ...);
char *arena_strbuf_data(const arena_strbuf *buf);
size_t arena_strbuf_len(const arena_strbuf *buf);
int arena_strbuf_truncate(arena_strbuf *buf, size_t size);
int arena_strbuf_clear(arena_strbuf *buf);

/* Where memory comes from, and what escapes.
 *
 * arena_trace(depth) records, from now on, where each tick begins and ends and where each piece that
 * escapes was allocated: up to `depth` frames (32 at most) of the code above it; 0 stops, what was
 * recorded stays. In C a caller is known when its file defines ARENA_SITES before it includes this
 * header: the calls then note __FILE__, __LINE__ and __func__ by arena_at. Returns the depth before,
 * ARENA_E_INVALID, ARENA_E_NOMEM. ARENA_TRACE=depth in the environment sets the start;
 * arena_trace_words returns the depth of such a text, ARENA_E_INVALID when it makes no sense. */
typedef struct arena_frame {
    const char *file;
    const char *function;
    int line; /* 0: not known */
} arena_frame;
typedef struct arena_point {
    uint64_t turn; /* how many ticks of the row's name had begun */
    uint64_t low;  /* the fewest bytes alive in the stretch of turns that begins there */
} arena_point;
int arena_trace(int depth);
int arena_tracing(void);
int arena_trace_words(const char *words);
void arena_at(const char *file, int line, const char *function);

/* A row of the map: one kind of escape, from one site, in ticks of one name. */
typedef struct arena_escape {
    const char *kind;        /* "persist", "pin", "stale", "stray", "object" */
    const char *tick;        /* the name of the ticks, NULL when they have none */
    const arena_frame *site; /* where it was allocated (a pin: where the view was taken), */
    size_t site_depth;       /* innermost frame first; 0 when it is not known */
    const arena_frame *used; /* stale: where it was last used after its tick */
    size_t used_depth;
    uint64_t count;      /* alive now. Stale: handles that are held after the end */
    uint64_t bytes;      /* alive now. Stale: what the held handles had */
    uint64_t count_ever;
    uint64_t bytes_ever;
    uint64_t uses;       /* stale: how often it was used after the end */
    uint64_t first;      /* number of the tick of the first event */
    uint64_t last;       /* and of the last one */
    uint64_t turn;       /* ticks of that name that have begun */
    double age;          /* seconds since something of it has been alive without a break */
    const arena_point *history;
    size_t points;
    const char *example; /* what one of them is, "" when nobody said */
} arena_escape;
typedef void (*arena_escape_fn)(const arena_escape *row, void *arg);

/* Calls fn(row, arg) for each row, in no order; what `row` points to is good during the call. Returns
 * the number of rows. */
size_t arena_escapes(arena_escape_fn fn, void *arg);

/* Audit: the memory of ticks that end from now on is not used again until more than `budget` bytes
 * are kept, oldest first out; 0 stops. The memory of a C tick becomes inaccessible: whoever touches it
 * is recorded as a stale use, and goes on with what it finds, the true old bytes. That is by a handler
 * of SIGSEGV and SIGBUS, which hands faults that are not its own to the one before it. Records sites,
 * too: where the piece was allocated; of what a string grew by, and of calls without a place, where the
 * tick began. Of the touches between two calls of arena_escapes 1,024 are noted; at most 32,768 chunks are
 * kept. The kernel has no such handler: a system call that is given dead memory fails with EFAULT. Raw
 * pointers into a tick of Python's are not watched.
 * Returns ARENA_OK or ARENA_E_NOMEM. ARENA_AUDIT=1 (256 MiB) or =bytes in the environment sets the
 * start; arena_audit_words returns the bytes of such a text, SIZE_MAX when it makes no sense. */
int arena_audit(size_t budget);
size_t arena_audit_now(void);
size_t arena_audit_words(const char *words);

/* Persisted memory: lives until arena_free_persist, belongs to no thread. */
void *arena_alloc_persist(size_t size);
void *arena_zalloc_persist(size_t size);
void *arena_realloc_persist(void *old, size_t size);
void *arena_memdup_persist(const void *data, size_t size);
char *arena_strdup_persist(const char *text);
char *arena_strndup_persist(const char *text, size_t size);
char *arena_printf_persist(const char *format, ...);
arena_strbuf *arena_strbuf_new_persist(size_t capacity);
size_t arena_size_persist(const void *persisted);

/* Frees what a `_persist` call (or a stray) gave, growing strings too. NULL is fine. */
void arena_free_persist(void *persisted);

/* The allocator behind malloc, resolved once: ARENA_HEAP_NONE when it has no way to give memory back
 * (musl's), or when that is not known. */
enum {
    ARENA_HEAP_NONE = 0,
    ARENA_HEAP_GLIBC = 1,
    ARENA_HEAP_JEMALLOC = 2,
    ARENA_HEAP_MIMALLOC = 3,
    ARENA_HEAP_MACOS = 4
};
int arena_heap_kind(void);
const char *arena_heap_name(int kind);

/* cdef end */

/* Not for cffi, whose calls keep the GIL here: gives cached chunks back until at most `keep` bytes are
 * cached, in slices until `budget` nanoseconds are over (UINT64_MAX: no matter), then what is free inside
 * the C heap, unless the walk is predicted to pass the budget. That may take hundreds of milliseconds,
 * in which others who allocate from the heap wait. At most one runs in the process: a call that comes
 * meanwhile waits for it and gets its figures. Returns ARENA_OK, or ARENA_E_INVALID without `out`. */
#define ARENA_TRIM_KEEP_RETAINED SIZE_MAX /* for `keep`: what the retention wants stays */
enum { ARENA_TRIM_NO_HEAP = 0, ARENA_TRIM_TOO_DEAR = 1, ARENA_TRIM_WALKED = 2 };
typedef struct arena_trimmed {
    uint64_t run;      /* 1, 2, ...: which one in the process */
    uint64_t before;   /* resident memory in bytes; 0: not known here */
    uint64_t after;
    uint64_t chunks;   /* bytes of cached chunks given back, */
    uint64_t kept;     /* and that are still cached */
    uint64_t ns;       /* nanoseconds in all, */
    uint64_t chunk_ns; /* for the chunks, */
    uint64_t heap_ns;  /* and for the walk of the heap */
    int backend;       /* ARENA_HEAP_* */
    int heap;          /* ARENA_TRIM_*: what became of the walk */
    int code;          /* what the allocator returned. Not a success flag */
    int shared;        /* 1: another caller's run */
} arena_trimmed;
int arena_trim_all(size_t keep, uint64_t budget, uint64_t predicted, arena_trimmed *out);

/* Nor these: it knows no va_list. */
char *arena_vprintf(arena_tick *tick, const char *format, va_list args);
char *arena_vprintf_persist(const char *format, va_list args);

#if defined(__GNUC__)
/* The same declarations again, with what a compiler can check. */
char *arena_printf(arena_tick *tick, const char *format, ...) __attribute__((format(printf, 2, 3)));
char *arena_printf_persist(const char *format, ...) __attribute__((format(printf, 1, 2)));
int arena_strbuf_printf(arena_strbuf *buf, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void *arena_alloc(arena_tick *tick, size_t size) __attribute__((alloc_size(2)));
void *arena_zalloc(arena_tick *tick, size_t size) __attribute__((alloc_size(2)));
void *arena_alloc_persist(size_t size) __attribute__((alloc_size(1)));
void *arena_zalloc_persist(size_t size) __attribute__((alloc_size(1)));
#endif

#ifdef __cplusplus
}
#endif

#ifdef ARENA_SITES
#include "arena_sites.h"
#endif
#endif
