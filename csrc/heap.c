/* heap.c: what the C heap holds, as far as its allocator tells, and the settings of glibc's.
 *
 * To tell, an allocator takes the locks of its heaps one after another and goes through their lists of
 * free pieces: whoever allocates there waits meanwhile, and it waits for them. So these calls are never
 * made while a heap is trimmed, and whoever holds a lock that others need (such as the GIL) lets go of it.
 */
#include "internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static arena__heap_calls calls;
static pthread_once_t calls_once = PTHREAD_ONCE_INIT;

#define FIND(slot) (*(void **)(void *)&calls.slot = arena__beside_malloc(#slot))

static void find_calls(void) {
    calls.kind = arena_heap_kind();
    if (!FIND(mallctl)) *(void **)(void *)&calls.mallctl = arena__beside_malloc("je_mallctl");
    (void)FIND(mallinfo2);
    (void)FIND(mallinfo);
    (void)FIND(malloc_info);
    (void)FIND(mallopt);
    (void)FIND(mi_process_info);
    (void)FIND(malloc_zone_statistics);
}

arena__heap_calls *arena__heap_here(void) {
    (void)pthread_once(&calls_once, find_calls);
    return &calls;
}

/* glibc's figures are of all its heaps, but for the top, which is the main one's. What a thread keeps
 * for itself to reuse (its tcache, some 60 KB at the most) counts as used. */
static void ask_glibc(const arena__heap_calls *here, arena__figures *out) {
    arena__mallinfo2 now = {0};
    if (here->mallinfo2)
        now = here->mallinfo2();
    else if (here->mallinfo) { /* before 2.33: an int each, which wraps */
        arena__mallinfo old = here->mallinfo();
        now.arena = (unsigned)old.arena, now.ordblks = (unsigned)old.ordblks;
        now.smblks = (unsigned)old.smblks, now.hblkhd = (unsigned)old.hblkhd;
        now.uordblks = (unsigned)old.uordblks, now.fordblks = (unsigned)old.fordblks;
        now.keepcost = (unsigned)old.keepcost;
        out->wraps = true;
    } else
        return;
    out->held = now.arena + now.hblkhd;
    out->used = now.uordblks + now.hblkhd;
    out->free = now.fordblks;
    out->top = now.keepcost;
    out->mmapped = now.hblkhd;
    out->pieces = now.ordblks + now.smblks;
}

static uint64_t mallctl_figure(const arena__heap_calls *here, const char *name) {
    size_t value = 0, size = sizeof value;
    return here->mallctl(name, &value, &size, NULL, 0) == 0 ? value : ARENA__UNKNOWN;
}

/* jemalloc can be built without figures: then all but the number of its arenas is unknown. */
static void ask_jemalloc(const arena__heap_calls *here, arena__figures *out) {
    uint64_t epoch = 1; /* its figures are as of the last time that this was written */
    (void)here->mallctl("epoch", NULL, NULL, &epoch, sizeof epoch);
    out->used = mallctl_figure(here, "stats.allocated");
    out->held = mallctl_figure(here, "stats.resident");
    uint64_t own = mallctl_figure(here, "stats.metadata");
    if (out->used == ARENA__UNKNOWN || out->held == ARENA__UNKNOWN) return;
    uint64_t taken = out->used + (own == ARENA__UNKNOWN ? 0 : own);
    out->free = out->held > taken ? out->held - taken : 0;
}

static void ask_mimalloc(const arena__heap_calls *here, arena__figures *out) {
    size_t elapsed, user, system, resident, most, committed = 0, most_committed, faults;
    if (!here->mi_process_info) return;
    here->mi_process_info(&elapsed, &user, &system, &resident, &most, &committed, &most_committed,
                          &faults);
    out->held = committed;
}

/* Not tested. */
static void ask_macos(const arena__heap_calls *here, arena__figures *out) {
    struct arena__zone_statistics now = {0};
    if (!here->malloc_zone_statistics) return;
    here->malloc_zone_statistics(NULL, &now);
    out->used = now.size_in_use;
    out->held = now.size_allocated;
    out->free = now.size_allocated > now.size_in_use ? now.size_allocated - now.size_in_use : 0;
}

/* False: a trim runs, and nothing is known. */
bool arena__heap_figures(arena__figures *out) {
    const arena__heap_calls *here = arena__heap_here();
    const uint64_t unknown = ARENA__UNKNOWN;
    *out = (arena__figures){here->kind, false, unknown, unknown, unknown, unknown, unknown, unknown};
    if (!arena__sample_begin()) return false;
    switch (here->kind) {
    case ARENA_HEAP_GLIBC: ask_glibc(here, out); break;
    case ARENA_HEAP_JEMALLOC: ask_jemalloc(here, out); break;
    case ARENA_HEAP_MIMALLOC: ask_mimalloc(here, out); break;
    case ARENA_HEAP_MACOS: ask_macos(here, out); break;
    default: break;
    }
    arena__sample_end();
    return true;
}

/* glibc tells how many heaps it has only in a text, with an element for each. */
static uint64_t count_in_text(const arena__heap_calls *here) {
    static const char MARK[] = "<heap nr=";
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file) return ARENA__UNKNOWN;
    int failed = here->malloc_info(0, file);
    if (fclose(file) != 0 || failed || !text) {
        free(text);
        return ARENA__UNKNOWN;
    }
    uint64_t count = 0;
    for (const char *at = text; (at = strstr(at, MARK)); at += sizeof MARK - 1) count++;
    free(text);
    return count;
}

/* How many heaps (jemalloc: arenas) there are, or ARENA__UNKNOWN. False: a trim runs. */
bool arena__heap_count(uint64_t *count) {
    const arena__heap_calls *here = arena__heap_here();
    unsigned arenas;
    size_t size = sizeof arenas;
    *count = ARENA__UNKNOWN;
    if (!arena__sample_begin()) return false;
    if (here->kind == ARENA_HEAP_GLIBC && here->malloc_info)
        *count = count_in_text(here);
    else if (here->kind == ARENA_HEAP_JEMALLOC &&
             here->mallctl("arenas.narenas", &arenas, &size, NULL, 0) == 0)
        *count = arenas;
    arena__sample_end();
    return true;
}

/* Sets what glibc calls M_MMAP_THRESHOLD, M_ARENA_MAX, ... false: it is not glibc, or it refuses. Waits
 * for whoever has the main heap. */
bool arena__heap_set(int option, int value) {
    const arena__heap_calls *here = arena__heap_here();
    return here->kind == ARENA_HEAP_GLIBC && here->mallopt && here->mallopt(option, value) == 1;
}
