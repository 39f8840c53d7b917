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
 * spike is forgotten after at most 3 * ARENA__WINDOW ticks. That is the adaptive policy; the others
 * keep all, none, or so many bytes, and never look at windows.
 *
 * Ticks of a name that has a policy of its own have a pool of their own: what they return is kept, or
 * not, apart from the others'. Windows are the process's for all pools, so that a name that never comes
 * again keeps nothing either, under the adaptive policy.
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

typedef struct pool {
    char name[sizeof((arena_tick *)0)->name]; /* of its ticks; the first one's are all others */
    int policy; /* ARENA_RETAIN_*; guarded by the lock, as all of it */
    size_t most; /* bytes, for ARENA_RETAIN_BYTES */
    size_t cached; /* bytes */
    arena__chunk *cache[ARENA__CLASSES];
    size_t cached_count[ARENA__CLASSES];
    size_t in_use[ARENA__CLASSES];   /* chunks of the class that open ticks hold */
    size_t peak_now[ARENA__CLASSES]; /* the most of it in this window */
    size_t peak_last[ARENA__CLASSES]; /* and in the window before */
} pool;

static struct {
    pthread_mutex_t lock;
    pool pools[ARENA__POOLS];
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

_Atomic unsigned arena__named_pools;
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
    arena__trim_forking();
    arena__audit_forking();
    arena__lock();
    arena__sites_lock();
}

static void unlock_all(void) {
    arena__sites_unlock();
    arena__unlock();
    arena__audit_forked();
}

static void forked_parent(void) {
    unlock_all();
    arena__trim_forked(false);
}

/* A fork while another thread holds the lock would leave it locked for ever in the child. And the
 * ticks of the other threads are nobody's there: their memory goes, but for what a view shows. */
static void forked(void) {
    unlock_all();
    arena__trim_forked(true);
    arena__sweep(arena__self.id, true);
    arena__ticks_forked();
    /* Another thread may have been half way through taking or giving back: all is counted anew. */
    size_t strict = 0;
    pages.chunks = 0;
    for (pool *p = pages.pools; p < pages.pools + ARENA__POOLS; p++) memset(p->in_use, 0, sizeof p->in_use);
    for (const arena_tick *tick = pages.open; tick; tick = tick->open_next) {
        if (tick->strict) strict += arena__used(tick);
        for (const arena__chunk *chunk = tick->chunks; chunk; chunk = chunk->next) {
            pages.chunks += chunk->size;
            if (chunk->klass < ARENA__CLASSES) pages.pools[chunk->pool].in_use[chunk->klass]++;
        }
    }
    arena__held_forked(strict);
    arena__export_forked();
}

__attribute__((constructor)) static void set_up(void) {
    long size = sysconf(_SC_PAGESIZE);
    if (size > 0) page = (size_t)size;
    (void)pthread_atfork(forking, forked_parent, forked);
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

/* All pools that may hold anything. */
#define EACH_POOL(p) \
    (pool *p = pages.pools, *end = p + 1 + ARENA__LOAD(arena__named_pools); p < end; p++)

/* Under the lock: takes a chunk that is cached, or NULL. */
static arena__chunk *cache_take(pool *from, unsigned klass) {
    arena__chunk *chunk = from->cache[klass];
    if (!chunk) return NULL;
    from->cache[klass] = chunk->next;
    from->cached_count[klass]--;
    from->cached -= chunk->size;
    ARENA__SUB(pages.cached, chunk->size);
    return chunk;
}

static void cache_put(pool *to, arena__chunk *chunk) {
    if (chunk->extent > chunk->dirty) chunk->dirty = chunk->extent;
    chunk->next = to->cache[chunk->klass];
    to->cache[chunk->klass] = chunk;
    to->cached_count[chunk->klass]++;
    to->cached += chunk->size;
    ARENA__ADD(pages.cached, chunk->size);
}

/* Under the lock: moves cached chunks of a class to `batch` until `keep` of them are left. */
static arena__chunk *evict(pool *from, unsigned klass, size_t keep, arena__chunk *batch) {
    while (from->cached_count[klass] > keep) {
        arena__chunk *chunk = cache_take(from, klass);
        chunk->next = batch;
        batch = chunk;
    }
    return batch;
}

/* Chunks of the class that the window says are needed, whatever the policy. */
static size_t needed(const pool *p, unsigned klass) {
    size_t now = p->peak_now[klass], last = p->peak_last[klass];
    return now > last ? now : last;
}

/* Chunks of the class that are to stay cached. */
static size_t wanted(const pool *p, unsigned klass) {
    switch (p->policy) {
    case ARENA_RETAIN_ADAPTIVE: return needed(p, klass) - p->in_use[klass]; /* never below the use */
    case ARENA_RETAIN_AS_PROCESS:
    case ARENA_RETAIN_NONE: return 0;
    default: return p->cached_count[klass]; /* what is over the bytes was never put there */
    }
}

/* The end of a window. Without a cache there is nothing to decide, and no lock to take. */
void arena__retention_roll(void) {
    arena__chunk *batch = NULL;
    if (!ARENA__LOAD(pages.cached)) return;
    arena__lock();
    for EACH_POOL(p)
        for (unsigned k = 0; k < ARENA__CLASSES; k++) {
            batch = evict(p, k, wanted(p, k), batch);
            p->peak_last[k] = p->peak_now[k];
            p->peak_now[k] = p->in_use[k];
        }
    arena__unlock();
    arena__chunks_discard(batch);
}

static void enter_use(size_t size, unsigned klass, pool *p) {
    pages.chunks += size;
    if (pages.chunks > pages.chunks_peak) pages.chunks_peak = pages.chunks;
    if (klass < ARENA__CLASSES && ++p->in_use[klass] > p->peak_now[klass])
        p->peak_now[klass] = p->in_use[klass];
}

static pool *pool_of(const arena__chunk *chunk) {
    return &pages.pools[chunk->pool];
}

static void leave_use(const arena__chunk *chunk) {
    pages.chunks -= chunk->size;
    if (chunk->klass < ARENA__CLASSES) pool_of(chunk)->in_use[chunk->klass]--;
}

/* For a tick that is over, and kept by an audit, its chunks are not in use but in quarantine. */
static void take_in(const arena_tick *tick, size_t size, unsigned klass) {
    if (arena__state(tick) == ARENA__KEPT)
        ARENA__ADD(pages.quarantined, size);
    else
        enter_use(size, klass, &pages.pools[tick->pool]);
}

static void leave_quarantine(const arena__chunk *chunk) {
    ARENA__SUB(pages.quarantined, chunk->size);
    enter_use(chunk->size, chunk->klass, pool_of(chunk));
}

/* Under the lock: whether the pool takes another cached chunk of this size. */
static bool retains(const pool *p, size_t size) {
    switch (p->policy) {
    case ARENA_RETAIN_NONE: return false;
    case ARENA_RETAIN_BYTES: return size <= p->most && p->cached <= p->most - size;
    default: return true;
    }
}

/* Under the lock: a chunk that nobody uses goes to the cache, or into the batch to discard. */
static arena__chunk *let_go(arena__chunk *chunk, arena__chunk *batch) {
    bool reuse = !(ARENA__LOAD(arena__debug_flags) & (ARENA_DEBUG_NOREUSE | ARENA_DEBUG_GUARD));
    pool *p = pool_of(chunk);
    leave_use(chunk);
    if (ARENA__UNLIKELY(p->policy == ARENA_RETAIN_AS_PROCESS)) p = pages.pools; /* since it began */
    if (chunk->klass < ARENA__CLASSES && reuse && retains(p, chunk->size)) {
        cache_put(p, chunk);
        return batch;
    }
    chunk->next = batch;
    return chunk;
}

/* ---- Policies --------------------------------------------------------------------------------- */

/* Under the lock: the pool of this name; NULL when it has none. */
static pool *find_pool(const char *name) {
    size_t length = strnlen(name, sizeof pages.pools->name - 1);
    for (pool *p = pages.pools + 1; p <= pages.pools + ARENA__LOAD(arena__named_pools); p++)
        if (strncmp(p->name, name, length) == 0 && p->name[length] == '\0') return p;
    return NULL;
}

/* The number of the pool for a tick of this name that begins. */
uint8_t arena__pool_of(const char *name) {
    if (!name || !*name) return 0;
    arena__lock();
    const pool *p = find_pool(name);
    uint8_t number = p && p->policy != ARENA_RETAIN_AS_PROCESS ? (uint8_t)(p - pages.pools) : 0;
    arena__unlock();
    return number;
}

/* Under the lock: what the policy of the pool does not keep. */
static arena__chunk *enforce(pool *p) {
    arena__chunk *batch = NULL;
    size_t most = p->policy == ARENA_RETAIN_BYTES ? p->most : SIZE_MAX;
    for (unsigned k = ARENA__CLASSES; k-- > 0;) {
        size_t keep = wanted(p, k);
        while (p->cached_count[k] > keep || (p->cached_count[k] && p->cached > most))
            batch = evict(p, k, p->cached_count[k] - 1, batch);
    }
    return batch;
}

/* Whether no name has it any more, and no open tick's memory is of it. (What views pin, or an audit
 * keeps, may come back to it later, and is then under the policy of the name that has it.) */
static bool is_spare(const pool *p) {
    size_t chunks = 0;
    for (unsigned k = 0; k < ARENA__CLASSES; k++) chunks += p->in_use[k] + p->cached_count[k];
    return p->policy == ARENA_RETAIN_AS_PROCESS && !chunks;
}

/* Under the lock: a pool for a name that has none, or NULL when there are too many. */
static pool *new_pool(const char *name) {
    unsigned named = ARENA__LOAD(arena__named_pools);
    pool *p = pages.pools + 1, *past = p + named;
    while (p < past && !is_spare(p)) p++;
    if (p == pages.pools + ARENA__POOLS) return NULL;
    memset(p, 0, sizeof *p);
    memcpy(p->name, name, strnlen(name, sizeof p->name - 1));
    if (p == past) ARENA__STORE(arena__named_pools, named + 1);
    return p;
}

int arena_retain(const char *name, int policy, size_t bytes) {
    bool process = !name || !*name;
    if (policy < ARENA_RETAIN_ADAPTIVE || policy > ARENA_RETAIN_AS_PROCESS ||
        (process && policy == ARENA_RETAIN_AS_PROCESS))
        return arena__fail(ARENA_E_INVALID);
    arena__lock();
    pool *p = process ? pages.pools : find_pool(name);
    if (!p) {
        if (policy != ARENA_RETAIN_AS_PROCESS) p = new_pool(name);
        if (!p) {
            arena__unlock();
            return policy == ARENA_RETAIN_AS_PROCESS ? ARENA_OK : arena__fail(ARENA_E_LIMIT);
        }
    }
    p->policy = policy;
    p->most = bytes;
    arena__chunk *batch = enforce(p);
    arena__unlock();
    arena__chunks_discard(batch);
    return ARENA_OK;
}

size_t arena_retention(arena_retained *out, size_t room) {
    size_t count = 0;
    arena__lock();
    for EACH_POOL(p) {
        if (p->policy == ARENA_RETAIN_AS_PROCESS) continue;
        if (count < room) {
            arena_retained *row = out + count;
            *row = (arena_retained){.policy = p->policy, .most = p->most, .cached = p->cached};
            memcpy(row->name, p->name, sizeof row->name);
            for (unsigned k = 0; k < ARENA__CLASSES; k++) row->needed += needed(p, k) * class_size(k);
        }
        count++;
    }
    arena__unlock();
    return count;
}

static size_t page_round(size_t size) {
    return (size + page - 1) & ~(page - 1);
}

/* Of a request that is larger than the largest class: in huge pages, where the system gives them to
 * those who ask. The faults of 12 MB in small pages cost four times as much as their copy. Up to 2 MiB
 * may be resident in vain. */
static bool wants_huge(const arena_tick *tick, size_t size) {
    return tick->group && size > ARENA__CHUNK_MAX;
}

static void ask_for_huge(void *start, size_t size) {
#ifdef MADV_HUGEPAGE
    (void)madvise(start, size, MADV_HUGEPAGE);
#else
    (void)start, (void)size;
#endif
}

/* Huge pages are asked for before the first byte is touched: a page that is there already keeps the
 * 2 MiB around it small. */
static arena__chunk *map_pages(size_t size, bool huge) {
    arena__chunk *chunk = arena__system.map(size);
    /* What is cached in other classes may be what is missing. */
    if (!chunk && arena_trim(0)) chunk = arena__system.map(size);
    if (!chunk) return NULL;
    if (huge) ask_for_huge(chunk, size);
    chunk->size = size;
    return chunk;
}

static arena__chunk *map_chunk(size_t size) {
    return map_pages(size, false);
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

static size_t oversize_round(const arena_tick *tick, size_t size) {
    size_t unit = wants_huge(tick, size) ? ARENA__HUGE : page;
    return (size + unit - 1) & ~(unit - 1);
}

static arena__chunk *map_oversize(const arena_tick *tick, size_t size) {
    if (ARENA__LOAD(arena__debug_flags) & ARENA_DEBUG_GUARD) return map_guarded(size);
    return map_pages(oversize_round(tick, size), wants_huge(tick, size));
}

/* A chunk with room for `need` bytes after its header, linked into the tick. NULL: no memory. */
arena__chunk *arena__chunk_get(arena_tick *tick, size_t need, bool alone) {
    unsigned klass = 0;
    while (klass < ARENA__CLASSES && class_size(klass) - ARENA__HEAD < need) klass++;
    if (klass == ARENA__CLASSES || (klass && tick->group)) klass = ARENA__OVERSIZE;
    arena__chunk *chunk = NULL;

    arena__lock();
    if (klass < ARENA__CLASSES) chunk = cache_take(&pages.pools[tick->pool], klass);
    if (!chunk) {
        /* Mapping under the lock would make every thread wait for the kernel. */
        arena__unlock();
        chunk = klass < ARENA__CLASSES ? map_chunk(class_size(klass))
                                       : map_oversize(tick, need + ARENA__HEAD);
        if (!chunk) return NULL;
        chunk->dirty = ARENA__HEAD;
        chunk->klass = (uint8_t)klass;
        if (arena__checked()) arena__check_shut(body_of(chunk), chunk->size - ARENA__HEAD);
        arena__lock();
        pages.maps++;
    }
    chunk->extent = ARENA__HEAD;
    chunk->pins = 0;
    chunk->pool = tick->pool;
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
    size_t old_size = chunk->size, size = oversize_round(tick, need + ARENA__HEAD);
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
    if (moved && wants_huge(tick, size)) ask_for_huge(moved, size);
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

/* Under the lock, an orphan begins and ends to count. The views keep the group, by their handle. */
static void count_pinned(const arena__chunk *chunk) {
    pages.pinned += chunk->size;
    pages.pinned_count++;
    if (!chunk->group) return;
    chunk->group->pinned += chunk->size;
    chunk->group->pinned_count++;
}

static void uncount_pinned(const arena__chunk *chunk) {
    pages.pinned -= chunk->size;
    pages.pinned_count--;
    if (!chunk->group) return;
    chunk->group->pinned -= chunk->size;
    chunk->group->pinned_count--;
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
        chunk->group = tick->group;
        count_pinned(chunk);
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
 * end (others == false), or in the child of a fork those of the threads that are not there. Requests
 * are no thread's, and stay. Their
 * records belong to the Python types, which find them ended. */
void arena__sweep(uint64_t owner, bool others) {
    arena__chunk *batch = NULL;
    arena__lock();
    for (arena_tick *tick = pages.open, *next; tick; tick = next) {
        next = tick->open_next;
        if (!tick->group && (ARENA__LOAD(tick->owner) == owner) != others) {
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
        uncount_pinned(chunk);
        chunk->next = NULL;
        batch = chunk;
    }
    arena__unlock();
    if (batch) scrub(batch, batch->wipe);
    arena__chunks_discard(batch);
}

/* Under the lock: takes a slice of what is cached beyond `keep`, the largest first. Each chunk that is
 * taken costs a cache miss or two, so a slice is microseconds. */
static arena__chunk *slice(size_t keep) {
    arena__chunk *batch = NULL;
    size_t left = ARENA__SLICE;
    for (unsigned k = ARENA__CLASSES; k-- > 0;)
        for EACH_POOL(p) {
            size_t have = p->cached_count[k], drop = 0;
            if (keep == ARENA_TRIM_KEEP_RETAINED)
                drop = have > wanted(p, k) ? have - wanted(p, k) : 0;
            else if (pages.cached > keep)
                drop = (pages.cached - keep + class_size(k) - 1) / class_size(k);
            if (drop > have) drop = have;
            if (drop > left) drop = left;
            batch = evict(p, k, have - drop, batch);
            left -= drop;
        }
    return batch;
}

/* Gives back what is cached beyond `keep` now, until the deadline: one slice at the least, and not what
 * other threads put there meanwhile, or it might never end. */
size_t arena__chunks_trim(size_t keep, uint64_t deadline) {
    size_t goal = ARENA__LOAD(pages.cached), given = 0;
    if (keep != ARENA_TRIM_KEEP_RETAINED) goal = goal > keep ? goal - keep : 0;
    while (given < goal) {
        arena__lock();
        size_t before = pages.cached;
        arena__chunk *batch = slice(keep);
        given += before - pages.cached;
        arena__unlock();
        if (!batch) break;
        arena__chunks_discard(batch);
        if (deadline != UINT64_MAX && arena__now_ns() >= deadline) break;
    }
    return given;
}

size_t arena__cached(void) {
    return ARENA__LOAD(pages.cached);
}

size_t arena_trim(size_t keep) {
    if (keep == ARENA_TRIM_KEEP_RETAINED) return 0; /* here it is a size like any other */
    return arena__chunks_trim(keep, UINT64_MAX);
}

void arena__pages_stats(arena_stats *out) {
    arena__lock();
    out->chunks = pages.chunks;
    out->chunks_peak = pages.chunks_peak;
    out->cached = pages.cached;
    for EACH_POOL(p)
        for (unsigned k = 0; k < ARENA__CLASSES; k++) out->high_water += needed(p, k) * class_size(k);
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
