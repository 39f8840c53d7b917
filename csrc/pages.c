/* pages.c: pages from the operating system, the chunk cache, retention.
 *
 * Why mappings and not malloc: what is unmapped is given back, whatever lies beside it. Why one
 * process-wide cache and not one per thread: ticks come and go on many threads, and a chunk that
 * sits in the cache of a thread that sleeps is a leak by another name. The price is one lock per
 * chunk taken and one per tick ended; an empty tick takes neither.
 *
 * Retention is kept for each size class apart. One total for all classes was tried on paper first:
 * it evicts the class that the steady loop needs to make room for one that a spike left behind,
 * and then every tick maps and unmaps. A window is ARENA__WINDOW ends of ticks, whether they held
 * memory or not. At its end, what neither it nor the window before needed at its peak goes. So a
 * spike is forgotten after at most 3 * ARENA__WINDOW ticks.
 */
#include "internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

_Static_assert(3 * ARENA__WINDOW <= 32, "a spike is forgotten within 32 ticks");

static struct {
    pthread_mutex_t lock;
    arena__chunk *cache[ARENA__CLASSES];
    size_t cached_count[ARENA__CLASSES];
    size_t in_use[ARENA__CLASSES];   /* chunks of the class that open ticks hold */
    size_t peak_now[ARENA__CLASSES]; /* the most of it in this window */
    size_t peak_last[ARENA__CLASSES]; /* and in the window before */
    arena_tick *open;
    size_t chunks; /* bytes, oversize included */
    size_t chunks_peak;
    _Atomic size_t cached;
    size_t pinned;
    uint64_t pinned_count;
    uint64_t pinned_ever;
    _Atomic size_t quarantined;
    size_t scratch_peak;
    uint64_t maps;
    _Atomic uint64_t unmaps;
    _Atomic uint64_t retired;
} pages = {.lock = PTHREAD_MUTEX_INITIALIZER};

static size_t page = 4096;

static void *os_map(size_t size) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static void os_unmap(void *start, size_t size) {
    (void)munmap(start, size);
}

static void *os_remap(void *start, size_t old_size, size_t size) {
#ifdef MREMAP_MAYMOVE
    void *moved = mremap(start, old_size, size, MREMAP_MAYMOVE);
    return moved == MAP_FAILED ? NULL : moved;
#else
    (void)start, (void)old_size, (void)size;
    return NULL;
#endif
}

/* A fresh mapping over the old one, and not mprotect: its memory goes back at once, and neighbours
 * merge into one mapping, of which a process may have 65,530. */
static bool os_seal(void *start, size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    return mmap(start, size, PROT_NONE, flags, -1, 0) != MAP_FAILED;
}

arena__os arena__system = {os_map, os_unmap, os_remap, os_seal, realloc, free};

void arena__lock(void) {
    (void)pthread_mutex_lock(&pages.lock);
}

void arena__unlock(void) {
    (void)pthread_mutex_unlock(&pages.lock);
}

static void forking(void) {
    arena__audit_forking();
    arena__lock();
    arena__sites_lock();
}

static void unlock_all(void) {
    arena__sites_unlock();
    arena__unlock();
    arena__audit_forked();
}

/* A fork while another thread holds the lock would leave it locked for ever in the child. And the
 * ticks of the other threads are nobody's there: their memory goes, but for what a view shows. */
static void forked(void) {
    unlock_all();
    arena__sweep(arena__self.id, true);
    arena__ticks_forked();
    /* Another thread may have been half way through taking or giving back: all is counted anew. */
    size_t strict = 0;
    pages.chunks = 0;
    memset(pages.in_use, 0, sizeof pages.in_use);
    for (const arena_tick *tick = pages.open; tick; tick = tick->open_next) {
        if (tick->strict) strict += arena__used(tick);
        for (const arena__chunk *chunk = tick->chunks; chunk; chunk = chunk->next) {
            pages.chunks += chunk->size;
            if (chunk->klass < ARENA__CLASSES) pages.in_use[chunk->klass]++;
        }
    }
    arena__held_forked(strict);
}

__attribute__((constructor)) static void set_up(void) {
    long size = sysconf(_SC_PAGESIZE);
    if (size > 0) page = (size_t)size;
    (void)pthread_atfork(forking, unlock_all, forked);
}

static size_t class_size(unsigned klass) {
    return ARENA__CHUNK_MIN << klass;
}

static char *body_of(arena__chunk *chunk) {
    return (char *)chunk + ARENA__HEAD;
}

/* All of its mapping. */
void arena__span_of(arena__chunk *chunk, char **start, size_t *size) {
    *start = (char *)chunk - chunk->lead;
    *size = chunk->lead + chunk->size + (chunk->guarded ? page : 0);
}

void arena__pages_unmap(void *start, size_t size) {
    arena__system.unmap(start, size);
    ARENA__ADD(pages.unmaps, 1);
}

/* The end of a chunk, outside of any lock: back to the system, unless the debug dial keeps it. */
static void discard(arena__chunk *chunk) {
    int flags = ARENA__LOAD(arena__debug_flags);
    char *start;
    size_t size;
    arena__span_of(chunk, &start, &size);
    if ((flags & ARENA_DEBUG_GUARD) && arena__system.seal(start, size)) {
        ARENA__ADD(pages.retired, size);
        return;
    }
    if ((flags & ARENA_DEBUG_NOREUSE) && !(flags & ARENA_DEBUG_GUARD)) {
        ARENA__ADD(pages.retired, size);
        return;
    }
    arena__check_open(start, size - (chunk->guarded ? page : 0)); /* whoever maps it next is others */
    arena__pages_unmap(start, size);
}

void arena__chunks_discard(arena__chunk *batch) {
    while (batch) {
        arena__chunk *next = batch->next;
        discard(batch);
        batch = next;
    }
}

/* What is to be done with the bytes of an ended chunk. Outside of any lock: it may be megabytes. */
static void scrub(arena__chunk *chunk, bool wipe) {
    bool fill = ARENA__LOAD(arena__debug_flags) & ARENA_DEBUG_FILL;
    size_t size = chunk->extent - ARENA__HEAD;
    if (wipe || fill) {
        arena__check_open(body_of(chunk), size);
        memset(body_of(chunk), wipe ? 0 : ARENA__FILL, size);
        __asm__ volatile("" : : "r"(chunk) : "memory"); /* not left out, whatever follows */
    }
    if (wipe && chunk->dirty <= chunk->extent) chunk->dirty = chunk->extent = ARENA__HEAD;
    if (arena__checked()) arena__check_shut(body_of(chunk), chunk->size - ARENA__HEAD);
}

static bool scrubs(const arena_tick *tick) {
    return tick->wipe || arena__checked() || (ARENA__LOAD(arena__debug_flags) & ARENA_DEBUG_FILL);
}

/* Under the lock: moves cached chunks of a class to `batch` until `keep` of them are left. */
static arena__chunk *evict(unsigned klass, size_t keep, arena__chunk *batch) {
    while (pages.cached_count[klass] > keep) {
        arena__chunk *chunk = pages.cache[klass];
        pages.cache[klass] = chunk->next;
        pages.cached_count[klass]--;
        ARENA__SUB(pages.cached, chunk->size);
        chunk->next = batch;
        batch = chunk;
    }
    return batch;
}

static size_t wanted(unsigned klass) {
    size_t now = pages.peak_now[klass], last = pages.peak_last[klass];
    return now > last ? now : last;
}

/* The end of a window. Without a cache there is nothing to decide, and no lock to take. */
void arena__retention_roll(void) {
    arena__chunk *batch = NULL;
    if (!ARENA__LOAD(pages.cached)) return;
    arena__lock();
    for (unsigned k = 0; k < ARENA__CLASSES; k++) {
        size_t used = pages.in_use[k];
        batch = evict(k, wanted(k) - used, batch); /* a peak is never below the use */
        pages.peak_last[k] = pages.peak_now[k];
        pages.peak_now[k] = used;
    }
    arena__unlock();
    arena__chunks_discard(batch);
}

static void enter_use(size_t size, unsigned klass) {
    pages.chunks += size;
    if (pages.chunks > pages.chunks_peak) pages.chunks_peak = pages.chunks;
    if (klass < ARENA__CLASSES && ++pages.in_use[klass] > pages.peak_now[klass])
        pages.peak_now[klass] = pages.in_use[klass];
}

static void leave_use(const arena__chunk *chunk) {
    pages.chunks -= chunk->size;
    if (chunk->klass < ARENA__CLASSES) pages.in_use[chunk->klass]--;
}

/* For a tick that is over, and kept by an audit, its chunks are not in use but in quarantine. */
static void take_in(const arena_tick *tick, size_t size, unsigned klass) {
    if (arena__state(tick) == ARENA__KEPT)
        ARENA__ADD(pages.quarantined, size);
    else
        enter_use(size, klass);
}

static void leave_quarantine(const arena__chunk *chunk) {
    ARENA__SUB(pages.quarantined, chunk->size);
    enter_use(chunk->size, chunk->klass);
}

static void cache_put(arena__chunk *chunk) {
    if (chunk->extent > chunk->dirty) chunk->dirty = chunk->extent;
    chunk->next = pages.cache[chunk->klass];
    pages.cache[chunk->klass] = chunk;
    pages.cached_count[chunk->klass]++;
    ARENA__ADD(pages.cached, chunk->size);
}

/* Under the lock: a chunk that nobody uses goes to the cache, or into the batch to discard. */
static arena__chunk *let_go(arena__chunk *chunk, arena__chunk *batch) {
    bool reuse = !(ARENA__LOAD(arena__debug_flags) & (ARENA_DEBUG_NOREUSE | ARENA_DEBUG_GUARD));
    leave_use(chunk);
    if (chunk->klass < ARENA__CLASSES && reuse) {
        cache_put(chunk);
        return batch;
    }
    chunk->next = batch;
    return chunk;
}

static size_t page_round(size_t size) {
    return (size + page - 1) & ~(page - 1);
}

static arena__chunk *map_chunk(size_t size) {
    arena__chunk *chunk = arena__system.map(size);
    /* What is cached in other classes may be what is missing. */
    if (!chunk && arena_trim(0)) chunk = arena__system.map(size);
    if (chunk) chunk->size = size;
    return chunk;
}

/* An oversize chunk that ends where a page that faults begins. */
static arena__chunk *map_guarded(size_t size) {
    size_t whole = page_round(size);
    char *start = (char *)map_chunk(whole + page);
    if (!start) return NULL;
    if (!arena__system.seal(start + whole, page)) {
        arena__system.unmap(start, whole + page);
        return NULL;
    }
    size_t lead = whole - size;
    arena__chunk *chunk = (arena__chunk *)(void *)(start + lead);
    chunk->size = size;
    chunk->lead = (uint16_t)lead;
    chunk->guarded = true;
    return chunk;
}

static arena__chunk *map_oversize(size_t size) {
    if (ARENA__LOAD(arena__debug_flags) & ARENA_DEBUG_GUARD) return map_guarded(size);
    return map_chunk(page_round(size));
}

/* A chunk with room for `need` bytes after its header, linked into the tick. NULL: no memory. */
arena__chunk *arena__chunk_get(arena_tick *tick, size_t need, bool alone) {
    unsigned klass = 0;
    while (klass < ARENA__CLASSES && class_size(klass) - ARENA__HEAD < need) klass++;
    if (klass == ARENA__CLASSES) klass = ARENA__OVERSIZE;
    arena__chunk *chunk = NULL;

    arena__lock();
    if (klass < ARENA__CLASSES && pages.cache[klass]) {
        chunk = pages.cache[klass];
        pages.cache[klass] = chunk->next;
        pages.cached_count[klass]--;
        ARENA__SUB(pages.cached, chunk->size);
    } else {
        /* Mapping under the lock would make every thread wait for the kernel. */
        arena__unlock();
        chunk = klass < ARENA__CLASSES ? map_chunk(class_size(klass))
                                       : map_oversize(need + ARENA__HEAD);
        if (!chunk) return NULL;
        chunk->dirty = ARENA__HEAD;
        chunk->klass = (uint8_t)klass;
        if (arena__checked()) arena__check_shut(body_of(chunk), chunk->size - ARENA__HEAD);
        arena__lock();
        pages.maps++;
    }
    chunk->extent = ARENA__HEAD;
    chunk->pins = 0;
    chunk->alone = alone;
    chunk->orphan = false;
    chunk->wipe = false;
    take_in(tick, chunk->size, klass);
    if (!tick->chunks) { /* the tick's first chunk: from now on it has something to count */
        tick->open_next = pages.open;
        tick->open_prev = &pages.open;
        if (pages.open) pages.open->open_prev = &tick->open_next;
        pages.open = tick;
        if (arena__checked()) arena__check_pool_begin(tick);
    }
    chunk->prev = NULL;
    chunk->next = tick->chunks;
    if (tick->chunks) tick->chunks->prev = chunk;
    tick->chunks = chunk;
    arena__unlock();
    return chunk;
}

static void unlink_chunk(arena_tick *tick, arena__chunk *chunk) {
    if (chunk->prev)
        chunk->prev->next = chunk->next;
    else
        tick->chunks = chunk->next;
    if (chunk->next) chunk->next->prev = chunk->prev;
}

/* Gives one chunk back before its tick ends: what it held has moved elsewhere in the same tick, so
 * the tick keeps at least one chunk and stays on the open list. */
void arena__chunk_drop(arena_tick *tick, arena__chunk *chunk) {
    if (arena__checked()) arena__check_gone(tick, body_of(chunk));
    if (scrubs(tick)) scrub(chunk, tick->wipe);
    arena__lock();
    unlink_chunk(tick, chunk);
    if (arena__state(tick) == ARENA__KEPT) leave_quarantine(chunk);
    arena__chunk *batch = let_go(chunk, NULL);
    arena__unlock();
    arena__chunks_discard(batch);
}

/* Grows an oversize chunk by moving its pages instead of its bytes. NULL: not possible here, the
 * chunk is as it was. Under the lock, although the kernel may take a while to move gigabytes: a
 * child that is forked meanwhile finds the tick's list whole. */
arena__chunk *arena__chunk_resize(arena_tick *tick, arena__chunk *chunk, size_t need) {
    size_t old_size = chunk->size, size = page_round(need + ARENA__HEAD);
    if (chunk->klass != ARENA__OVERSIZE || size <= old_size || chunk->guarded) return NULL;
    /* A stale pointer must not find its old place free for others. */
    if (ARENA__LOAD(arena__debug_flags) & (ARENA_DEBUG_NOREUSE | ARENA_DEBUG_GUARD)) return NULL;
    if (arena__checked()) {
        arena__check_gone(tick, body_of(chunk));
        arena__check_open(chunk, old_size);
    }
    arena__lock();
    arena__chunk *moved = arena__system.remap(chunk, old_size, size);
    if (moved) {
        moved->size = size;
        if (moved->prev)
            moved->prev->next = moved;
        else
            tick->chunks = moved;
        if (moved->next) moved->next->prev = moved;
        take_in(tick, size - old_size, ARENA__OVERSIZE);
    }
    arena__unlock();
    arena__chunk *now = moved ? moved : chunk;
    if (arena__checked()) {
        arena__check_piece(tick, body_of(now), now->size - ARENA__HEAD);
        arena__check_open(body_of(now), old_size - ARENA__HEAD); /* what it holds is defined */
    }
    return moved;
}

/* Under the lock: takes an ending tick that holds chunks off the open list. */
static void close_list(arena_tick *tick) {
    size_t used = arena__used(tick);
    if (used > pages.scratch_peak) pages.scratch_peak = used;
    *tick->open_prev = tick->open_next;
    if (tick->open_next) tick->open_next->open_prev = tick->open_prev;
}

/* Under the lock: makes orphans of the pinned chunks of an ending tick, and returns the others; all of
 * them count as in use. */
static arena__chunk *part(arena_tick *tick, size_t *pinned) {
    arena__chunk *rest = NULL;
    if (arena__checked()) arena__check_pool_end(tick);
    for (arena__chunk *chunk = tick->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        if (!chunk->pins) {
            chunk->next = rest;
            rest = chunk;
            continue;
        }
        leave_use(chunk);
        chunk->orphan = true;
        chunk->wipe = tick->wipe;
        pages.pinned += chunk->size;
        pages.pinned_count++;
        pages.pinned_ever++;
        ++*pinned;
        arena__views_escaped(tick, chunk);
        if (arena__checked()) arena__check_open(body_of(chunk), chunk->extent - ARENA__HEAD);
    }
    tick->chunks = tick->current = NULL;
    return rest;
}

static arena__chunk *surrender(arena_tick *tick, size_t *pinned) {
    *pinned = 0;
    if (!tick->chunks) return NULL;
    close_list(tick);
    return part(tick, pinned);
}

static arena__chunk *let_go_all(arena__chunk *chunks) {
    arena__chunk *batch = NULL;
    for (arena__chunk *next; chunks; chunks = next) {
        next = chunks->next;
        batch = let_go(chunks, batch);
    }
    return batch;
}

/* Takes the lock over, and lets it go. Inlined: most ticks end here. */
static inline __attribute__((always_inline)) void give_back(const arena_tick *tick, arena__chunk *rest) {
    if (ARENA__UNLIKELY(scrubs(tick))) {
        arena__unlock();
        for (arena__chunk *chunk = rest; chunk; chunk = chunk->next) scrub(chunk, tick->wipe);
        arena__lock();
    }
    arena__chunk *batch = let_go_all(rest);
    arena__unlock();
    arena__chunks_discard(batch);
}

/* The end of a tick: every chunk goes to the cache, to the system, or, when a view into it lives,
 * to nobody until the last view dies. Returns how many were pinned. */
size_t arena__chunks_return(arena_tick *tick) {
    size_t pinned;
    arena__lock();
    if (tick->current) tick->current->extent = (size_t)(tick->pos - (char *)tick->current);
    arena__chunk *rest = surrender(tick, &pinned);
    if (ARENA__UNLIKELY(ARENA__LOAD(arena__budget) && rest && !tick->wipe)) {
        for (arena__chunk *chunk = rest; chunk; chunk = chunk->next) leave_use(chunk);
        arena__unlock();
        arena__bury(tick, rest);
        return pinned;
    }
    give_back(tick, rest);
    return pinned;
}

/* The end of a tick that an audit keeps: its chunks stay with it. */
size_t arena__chunks_keep(arena_tick *tick) {
    size_t pinned = 0;
    arena__lock();
    close_list(tick);
    for (arena__chunk *chunk = tick->chunks; chunk; chunk = chunk->next) {
        leave_use(chunk);
        ARENA__ADD(pages.quarantined, chunk->size);
        if (!chunk->pins) continue;
        pinned++;
        arena__views_escaped(tick, chunk);
    }
    arena__unlock();
    return pinned;
}

/* And when it lets them go. */
void arena__chunks_release(arena_tick *tick) {
    size_t pinned = 0;
    arena__lock();
    if (tick->current) tick->current->extent = (size_t)(tick->pos - (char *)tick->current);
    for (arena__chunk *chunk = tick->chunks; chunk; chunk = chunk->next) leave_quarantine(chunk);
    arena__chunk *rest = part(tick, &pinned);
    give_back(tick, rest);
}

void arena__quarantine_add(size_t size) {
    ARENA__ADD(pages.quarantined, size);
}

void arena__quarantine_sub(size_t size) {
    ARENA__SUB(pages.quarantined, size);
}

size_t arena__quarantined(void) {
    return ARENA__LOAD(pages.quarantined);
}

/* Under the lock: ends a tick that its own thread does not end, all in one step, so that a sweep and
 * whoever lets go of the record never both do it. Its chunks go to the batch. */
static arena__chunk *take_away(arena_tick *tick, bool scrubbed, arena__chunk *batch) {
    size_t pinned;
    if (arena__state(tick) == ARENA__ENDED) return batch;
    if (tick->current) tick->current->extent = tick->current->size; /* at the most */
    for (arena__chunk *rest = surrender(tick, &pinned), *next; rest; rest = next) {
        next = rest->next;
        leave_use(rest);
        if (scrubbed && scrubs(tick)) scrub(rest, tick->wipe);
        rest->next = batch;
        batch = rest;
    }
    arena__tick_taken(tick);
    return batch;
}

/* Takes the memory of the ticks that nobody can end any more: those of a thread that is about to
 * end (others == false), or in the child of a fork those of the threads that are not there. Their
 * records belong to the Python types, which find them ended. */
void arena__sweep(uint64_t owner, bool others) {
    arena__chunk *batch = NULL;
    arena__lock();
    for (arena_tick *tick = pages.open, *next; tick; tick = next) {
        next = tick->open_next;
        if ((ARENA__LOAD(tick->owner) == owner) != others) {
            arena__settle_held(tick);
            batch = take_away(tick, !others, batch);
        }
    }
    arena__unlock();
    arena__chunks_discard(batch);
}

/* The end of a tick whose object has gone in another thread than its own. That thread may be
 * sweeping at this moment: when this returns, it has let go of the record. */
void arena__close_foreign(arena_tick *tick) {
    arena__lock();
    if (arena__state(tick) != ARENA__ENDED) arena__settle(tick);
    arena__chunk *batch = take_away(tick, true, NULL);
    arena__unlock();
    arena__chunks_discard(batch);
}

/* Calls fn for each open tick that holds memory and is this thread's, or the Python types'. */
void arena__each_open(bool detached_too, void (*fn)(arena_tick *tick)) {
    arena__lock();
    for (arena_tick *tick = pages.open; tick; tick = tick->open_next)
        if (ARENA__LOAD(tick->owner) == arena__self.id || (detached_too && tick->detached)) fn(tick);
    arena__unlock();
}

void arena__pin(arena__chunk *chunk) {
    arena__lock();
    chunk->pins++;
    arena__unlock();
}

/* The last view of an ended tick's chunk frees it, from whichever thread: straight to the system,
 * for the retention of a class is what open ticks used, and this one was not in use. */
void arena__unpin(arena__chunk *chunk) {
    arena__chunk *batch = NULL;
    arena__lock();
    if (--chunk->pins == 0 && chunk->orphan) {
        pages.pinned -= chunk->size;
        pages.pinned_count--;
        chunk->next = NULL;
        batch = chunk;
    }
    arena__unlock();
    if (batch) scrub(batch, batch->wipe);
    arena__chunks_discard(batch);
}

size_t arena_trim(size_t keep) {
    arena__chunk *batch = NULL;
    arena__lock();
    size_t before = pages.cached;
    for (unsigned k = ARENA__CLASSES; k-- > 0 && pages.cached > keep;) {
        size_t over = pages.cached - keep;
        size_t drop = (over + class_size(k) - 1) / class_size(k);
        size_t have = pages.cached_count[k];
        batch = evict(k, have > drop ? have - drop : 0, batch);
    }
    size_t given = before - pages.cached;
    arena__unlock();
    arena__chunks_discard(batch);
    return given;
}

void arena__pages_stats(arena_stats *out) {
    arena__lock();
    out->chunks = pages.chunks;
    out->chunks_peak = pages.chunks_peak;
    out->cached = pages.cached;
    for (unsigned k = 0; k < ARENA__CLASSES; k++) out->high_water += wanted(k) * class_size(k);
    out->quarantined = ARENA__LOAD(pages.quarantined);
    out->pinned = pages.pinned;
    out->pinned_count = pages.pinned_count;
    out->pinned_ever = pages.pinned_ever;
    out->scratch_peak = pages.scratch_peak;
    for (const arena_tick *tick = pages.open; tick; tick = tick->open_next) {
        size_t used = arena__used(tick);
        out->scratch += used;
        if (used > out->scratch_peak) out->scratch_peak = used;
    }
    out->maps = pages.maps;
    out->unmaps = ARENA__LOAD(pages.unmaps);
    out->retired = ARENA__LOAD(pages.retired);
    arena__unlock();
}
