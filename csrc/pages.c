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
#include <sys/mman.h>

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
    size_t cached;
    size_t pinned;
    uint64_t pinned_count;
    uint64_t pinned_ever;
    size_t scratch_peak;
    uint64_t maps;
    uint64_t unmaps;
} pages = {.lock = PTHREAD_MUTEX_INITIALIZER};

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

arena__os arena__system = {os_map, os_unmap, os_remap};

void arena__lock(void) {
    (void)pthread_mutex_lock(&pages.lock);
}

void arena__unlock(void) {
    (void)pthread_mutex_unlock(&pages.lock);
}

/* A fork while another thread holds the lock would leave it locked for ever in the child. */
__attribute__((constructor)) static void watch_forks(void) {
    (void)pthread_atfork(arena__lock, arena__unlock, arena__unlock);
}

static size_t class_size(unsigned klass) {
    return ARENA__CHUNK_MIN << klass;
}

static void batch_unmap(arena__chunk *batch) {
    uint64_t count = 0;
    while (batch) {
        arena__chunk *next = batch->next;
        arena__system.unmap(batch, batch->size);
        batch = next;
        count++;
    }
    if (count) ARENA__ADD(pages.unmaps, count);
}

/* Under the lock: moves cached chunks of a class to `batch` until `keep` of them are left. */
static arena__chunk *evict(unsigned klass, size_t keep, arena__chunk *batch) {
    while (pages.cached_count[klass] > keep) {
        arena__chunk *chunk = pages.cache[klass];
        pages.cache[klass] = chunk->next;
        pages.cached_count[klass]--;
        ARENA__STORE(pages.cached, pages.cached - chunk->size);
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
    batch_unmap(batch);
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

static void cache_put(arena__chunk *chunk) {
    if (chunk->extent > chunk->dirty) chunk->dirty = chunk->extent;
    chunk->next = pages.cache[chunk->klass];
    pages.cache[chunk->klass] = chunk;
    pages.cached_count[chunk->klass]++;
    ARENA__STORE(pages.cached, pages.cached + chunk->size);
}

static size_t page_round(size_t size) {
    return (size + 4095) & ~(size_t)4095;
}

/* A chunk with room for `need` bytes after its header, linked into the tick. NULL: no memory. */
arena__chunk *arena__chunk_get(arena_tick *tick, size_t need, bool alone) {
    unsigned klass = 0;
    while (klass < ARENA__CLASSES && class_size(klass) - ARENA__HEAD < need) klass++;
    if (klass == ARENA__CLASSES) klass = ARENA__OVERSIZE;
    size_t size = klass == ARENA__OVERSIZE ? page_round(need + ARENA__HEAD) : class_size(klass);
    arena__chunk *chunk = NULL;

    arena__lock();
    if (klass < ARENA__CLASSES && pages.cache[klass]) {
        chunk = pages.cache[klass];
        pages.cache[klass] = chunk->next;
        pages.cached_count[klass]--;
        ARENA__STORE(pages.cached, pages.cached - size);
    } else {
        /* Mapping under the lock would make every thread wait for the kernel. */
        arena__unlock();
        chunk = arena__system.map(size);
        /* What is cached in other classes may be what is missing. */
        if (!chunk && arena_trim(0)) chunk = arena__system.map(size);
        if (!chunk) return NULL;
        chunk->size = size;
        chunk->dirty = ARENA__HEAD;
        chunk->klass = (uint8_t)klass;
        arena__lock();
        pages.maps++;
    }
    chunk->extent = ARENA__HEAD;
    chunk->pins = 0;
    chunk->alone = alone;
    chunk->orphan = false;
    enter_use(size, klass);
    if (!tick->chunks) { /* the tick's first chunk: from now on it has something to count */
        tick->open_next = pages.open;
        tick->open_prev = &pages.open;
        if (pages.open) pages.open->open_prev = &tick->open_next;
        pages.open = tick;
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
    arena__chunk *batch = NULL;
    arena__lock();
    unlink_chunk(tick, chunk);
    leave_use(chunk);
    if (chunk->klass < ARENA__CLASSES) {
        cache_put(chunk);
    } else {
        chunk->next = NULL;
        batch = chunk;
    }
    arena__unlock();
    batch_unmap(batch);
}

/* Grows an oversize chunk by moving its pages instead of its bytes. NULL: not possible here, the
 * chunk is as it was. */
arena__chunk *arena__chunk_resize(arena_tick *tick, arena__chunk *chunk, size_t need) {
    size_t old_size = chunk->size, size = page_round(need + ARENA__HEAD);
    if (chunk->klass != ARENA__OVERSIZE || size <= old_size) return NULL;
    arena__chunk *moved = arena__system.remap(chunk, old_size, size);
    if (!moved) return NULL;
    moved->size = size;
    if (moved->prev)
        moved->prev->next = moved;
    else
        tick->chunks = moved;
    if (moved->next) moved->next->prev = moved;
    arena__lock();
    enter_use(size - old_size, ARENA__OVERSIZE);
    arena__unlock();
    return moved;
}

/* The end of a tick: every chunk goes to the cache, to the system, or, when a view into it lives,
 * to nobody until the last view dies. Returns how many were pinned. */
size_t arena__chunks_return(arena_tick *tick) {
    size_t used = arena__used(tick), pinned = 0;
    arena__chunk *batch = NULL;
    if (tick->current) tick->current->extent = (size_t)(tick->pos - (char *)tick->current);

    arena__lock();
    if (used > pages.scratch_peak) pages.scratch_peak = used;
    *tick->open_prev = tick->open_next;
    if (tick->open_next) tick->open_next->open_prev = tick->open_prev;
    for (arena__chunk *chunk = tick->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        leave_use(chunk);
        if (chunk->pins) {
            chunk->orphan = true;
            pages.pinned += chunk->size;
            pages.pinned_count++;
            pages.pinned_ever++;
            pinned++;
        } else if (chunk->klass < ARENA__CLASSES) {
            cache_put(chunk);
        } else {
            chunk->next = batch;
            batch = chunk;
        }
    }
    arena__unlock();
    tick->chunks = tick->current = NULL;
    batch_unmap(batch);
    return pinned;
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
    batch_unmap(batch);
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
    batch_unmap(batch);
    return given;
}

void arena__pages_stats(arena_stats *out) {
    arena__lock();
    out->chunks = pages.chunks;
    out->chunks_peak = pages.chunks_peak;
    out->cached = pages.cached;
    for (unsigned k = 0; k < ARENA__CLASSES; k++) out->high_water += wanted(k) * class_size(k);
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
    arena__unlock();
}
