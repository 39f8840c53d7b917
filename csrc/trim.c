/* trim.c: giving memory back to the operating system: arena's cached chunks, then what is free inside
 * the C heap.
 *
 * Walking the heap (malloc_trim) takes some 0.1 ms for each MB that comes back, and as much again for
 * the pieces that it looks at; for so long, whoever allocates from the heap that is being walked waits,
 * and so does fork(). So at most one thread walks at a time: whoever asks meanwhile gets its figures. None
 * of the locks here is held while a heap is walked, so a fork waits for none of them.
 *
 * glibc's return code is 1 even when nothing came back. What counts is resident memory, before and
 * after, as the system has it; when others allocate meanwhile their share is in that figure.
 */
#include "internal.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Which allocator the process has, and how it is asked to give back. */
static struct {
    arena__allocator base;
    int (*malloc_trim)(size_t pad);
    int (*mallctl)(const char *name, void *old, size_t *old_size, void *new, size_t new_size);
    void (*mi_collect)(bool force);
    size_t (*pressure_relief)(void *zone, size_t goal);
} allocator;
static pthread_once_t allocator_once = PTHREAD_ONCE_INIT;

static const char *const NAMES[] = {"none", "glibc", "jemalloc", "mimalloc", "macos"};

/* A function of that name, when it is in the same file as malloc: glibc's malloc_trim is in every
 * process, also in one whose malloc is another's. */
void *arena__beside_malloc(const char *name) {
    Dl_info here, there;
    void *malloc_at = dlsym(RTLD_DEFAULT, "malloc"), *at = dlsym(RTLD_DEFAULT, name);
    if (!malloc_at || !at || !dladdr(malloc_at, &here) || !dladdr(at, &there)) return NULL;
    return here.dli_fbase == there.dli_fbase ? at : NULL;
}

#define FIND(slot, name) (*(void **)(void *)&allocator.slot = arena__beside_malloc(name))

static int walk(void);

static void find_allocator(void) {
    allocator.base.walk = walk;
    if (FIND(mallctl, "mallctl") || FIND(mallctl, "je_mallctl"))
        allocator.base.kind = ARENA_HEAP_JEMALLOC;
    else if (FIND(mi_collect, "mi_collect"))
        allocator.base.kind = ARENA_HEAP_MIMALLOC;
    else if (FIND(malloc_trim, "malloc_trim"))
        allocator.base.kind = ARENA_HEAP_GLIBC;
    else if (FIND(pressure_relief, "malloc_zone_pressure_relief")) /* not tested */
        allocator.base.kind = ARENA_HEAP_MACOS;
}

arena__allocator *arena__allocator_here(void) {
    (void)pthread_once(&allocator_once, find_allocator);
    return &allocator.base;
}

int arena_heap_kind(void) {
    return arena__allocator_here()->kind;
}

const char *arena_heap_name(int kind) {
    return kind >= 0 && kind < (int)(sizeof NAMES / sizeof *NAMES) ? NAMES[kind] : "unknown";
}

static int walk(void) {
    switch (allocator.base.kind) {
    case ARENA_HEAP_GLIBC: return allocator.malloc_trim(0);
    case ARENA_HEAP_JEMALLOC: /* 4096 is MALLCTL_ARENAS_ALL */
        return allocator.mallctl("arena.4096.purge", NULL, NULL, NULL, 0);
    case ARENA_HEAP_MIMALLOC: allocator.mi_collect(true); return 0;
    case ARENA_HEAP_MACOS: return allocator.pressure_relief(NULL, 0) > 0;
    default: return 0;
    }
}

uint64_t arena__now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Resident memory of this process in bytes, the second number of Linux's statm; 0: not known. */
static uint64_t resident(void) {
    char text[128];
    unsigned long long pages = 0;
    int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    (void)close(file);
    if (size <= 0) return 0;
    text[size] = '\0';
    if (sscanf(text, "%*u %llu", &pages) != 1) return 0;
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Who is at the heap. The lock is held for a few instructions only. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool trimming;
    unsigned samples; /* readers of the heap's figures */
    unsigned waiting; /* for the trim that runs */
    arena_trimmed last;
} heap = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

void arena__trim_forking(void) {
    (void)pthread_mutex_lock(&heap.lock);
}

void arena__trim_forked(bool child) {
    if (child) { /* whoever trimmed, sampled or waited is not here */
        heap.trimming = false;
        heap.samples = heap.waiting = 0;
        (void)pthread_cond_init(&heap.changed, NULL);
    }
    (void)pthread_mutex_unlock(&heap.lock);
}

bool arena__sample_begin(void) {
    (void)pthread_mutex_lock(&heap.lock);
    bool free = !heap.trimming;
    if (free) heap.samples++;
    (void)pthread_mutex_unlock(&heap.lock);
    return free;
}

void arena__sample_end(void) {
    (void)pthread_mutex_lock(&heap.lock);
    if (--heap.samples == 0) (void)pthread_cond_broadcast(&heap.changed);
    (void)pthread_mutex_unlock(&heap.lock);
}

static void trim(size_t keep, uint64_t budget, uint64_t predicted, arena_trimmed *out) {
    uint64_t start = arena__now_ns(), deadline = start + budget;
    if (deadline < start) deadline = UINT64_MAX;
    out->before = resident();
    out->chunks = arena__chunks_trim(keep, deadline);
    out->kept = arena__cached();
    uint64_t chunks_done = arena__now_ns();
    out->chunk_ns = chunks_done - start;
    if (out->backend == ARENA_HEAP_NONE)
        out->heap = ARENA_TRIM_NO_HEAP;
    else if (predicted > budget || out->chunk_ns > budget - predicted)
        out->heap = ARENA_TRIM_TOO_DEAR;
    else {
        out->code = arena__allocator_here()->walk();
        out->heap = ARENA_TRIM_WALKED;
        out->heap_ns = arena__now_ns() - chunks_done;
    }
    out->after = resident();
    out->ns = arena__now_ns() - start;
}

int arena_trim_all(size_t keep, uint64_t budget, uint64_t predicted, arena_trimmed *out) {
    if (!out) return arena__fail(ARENA_E_INVALID);
    int kind = arena_heap_kind();
    (void)pthread_mutex_lock(&heap.lock);
    if (heap.trimming) {
        uint64_t run = heap.last.run + 1; /* the one that runs */
        heap.waiting++;
        while (heap.trimming && heap.last.run < run) (void)pthread_cond_wait(&heap.changed, &heap.lock);
        heap.waiting--;
        *out = heap.last;
        out->shared = 1;
        (void)pthread_mutex_unlock(&heap.lock);
        return ARENA_OK;
    }
    heap.trimming = true;
    while (heap.samples) (void)pthread_cond_wait(&heap.changed, &heap.lock);
    *out = (arena_trimmed){.run = heap.last.run + 1, .backend = kind};
    (void)pthread_mutex_unlock(&heap.lock);

    trim(keep, budget, predicted, out);

    (void)pthread_mutex_lock(&heap.lock);
    heap.last = *out;
    heap.trimming = false;
    (void)pthread_cond_broadcast(&heap.changed);
    (void)pthread_mutex_unlock(&heap.lock);
    return ARENA_OK;
}

/* How many wait for the trim that runs: for tests. */
unsigned arena__trim_waiting(void) {
    (void)pthread_mutex_lock(&heap.lock);
    unsigned waiting = heap.waiting;
    (void)pthread_mutex_unlock(&heap.lock);
    return waiting;
}
