/* test_heap.c: the C heap's figures, from allocators that a test supplies, and from the true one. */
#include "check.h"

#include <pthread.h>

static arena__heap_calls true_ones;

static void begin(int kind) {
    true_ones = *arena__heap_here();
    *arena__heap_here() = (arena__heap_calls){.kind = kind};
}

static void done(void) {
    *arena__heap_here() = true_ones;
}

static bool all_unknown(const arena__figures *f) {
    const uint64_t no = ARENA__UNKNOWN;
    return f->held == no && f->used == no && f->free == no && f->top == no && f->mmapped == no &&
           f->pieces == no && !f->wraps;
}

static arena__mallinfo2 large_info(void) {
    return (arena__mallinfo2){.arena = (size_t)5 << 32, .ordblks = 7, .smblks = 2, .hblkhd = 100,
                              .uordblks = (size_t)4 << 32, .fordblks = (size_t)1 << 32, .keepcost = 9};
}

static arena__mallinfo old_info(void) {
    return (arena__mallinfo){.arena = -4096, .ordblks = 7, .smblks = 2, .hblkhd = 100, .uordblks = 8,
                             .fordblks = 16, .keepcost = 9};
}

static void glibc_counts_the_mmapped_apart(void) {
    arena__figures f;
    begin(ARENA_HEAP_GLIBC);
    arena__heap_here()->mallinfo2 = large_info;
    arena__heap_here()->mallinfo = old_info; /* not asked */
    CHECK(arena__heap_figures(&f) && f.backend == ARENA_HEAP_GLIBC && !f.wraps);
    CHECK(f.held == ((uint64_t)5 << 32) + 100 && f.used == ((uint64_t)4 << 32) + 100);
    CHECK(f.free == (uint64_t)1 << 32 && f.top == 9 && f.mmapped == 100 && f.pieces == 9);
    done();
}

static void an_older_glibc_has_figures_that_wrap_and_they_are_not_negative(void) {
    arena__figures f;
    begin(ARENA_HEAP_GLIBC);
    arena__heap_here()->mallinfo = old_info;
    CHECK(arena__heap_figures(&f) && f.wraps);
    CHECK(f.held == UINT32_MAX - 4095 + (uint64_t)100 && f.used == 108 && f.free == 16);
    CHECK(f.top == 9 && f.mmapped == 100 && f.pieces == 9);
    done();
}

static int elements = 0, info_fails = 0;

static int write_info(int options, FILE *file) {
    CHECK(options == 0);
    fputs("<malloc version=\"1\">\n", file);
    for (int i = 0; i < elements; i++) fprintf(file, "<heap nr=\"%d\">\n<sizes/></heap>\n", i);
    fputs("<heap/></malloc>\n", file);
    return info_fails;
}

static void heaps_are_the_elements_of_a_text(void) {
    uint64_t count;
    begin(ARENA_HEAP_GLIBC);
    CHECK(arena__heap_count(&count) && count == ARENA__UNKNOWN);
    arena__heap_here()->malloc_info = write_info;
    for (elements = 0; elements < 3000; elements += 1499) {
        CHECK(arena__heap_count(&count) && count == (uint64_t)elements);
    }
    info_fails = -1;
    CHECK(arena__heap_count(&count) && count == ARENA__UNKNOWN);
    info_fails = 0;
    done();
}

static int epochs;
static bool without_figures;

static int answer(const char *name, void *old, size_t *size, void *new, size_t new_size) {
    if (strcmp(name, "arenas.narenas") == 0) {
        CHECK(*size == sizeof(unsigned));
        *(unsigned *)old = 17;
        return 0;
    }
    if (strcmp(name, "epoch") == 0) {
        CHECK(new && new_size == sizeof(uint64_t));
        return epochs++, 0;
    }
    if (without_figures) return 2; /* ENOENT */
    CHECK(*size == sizeof(size_t) && !new && new_size == 0);
    size_t *value = old;
    if (strcmp(name, "stats.allocated") == 0) return *value = 1000, 0;
    if (strcmp(name, "stats.resident") == 0) return *value = 1700, 0;
    CHECK(strcmp(name, "stats.metadata") == 0);
    return *value = 200, 0;
}

static void jemalloc_is_asked_after_a_new_epoch(void) {
    arena__figures f;
    uint64_t count;
    begin(ARENA_HEAP_JEMALLOC);
    arena__heap_here()->mallctl = answer;
    epochs = 0;
    CHECK(arena__heap_figures(&f) && epochs == 1 && f.backend == ARENA_HEAP_JEMALLOC);
    CHECK(f.held == 1700 && f.used == 1000 && f.free == 500);
    CHECK(f.mmapped == ARENA__UNKNOWN && f.pieces == ARENA__UNKNOWN && f.top == ARENA__UNKNOWN);
    CHECK(arena__heap_count(&count) && count == 17);
    without_figures = true;
    CHECK(arena__heap_figures(&f) && all_unknown(&f));
    without_figures = false;
    done();
}

static void process_info(size_t *elapsed, size_t *user, size_t *system, size_t *resident,
                         size_t *most_resident, size_t *committed, size_t *most_committed,
                         size_t *faults) {
    *elapsed = *user = *system = *resident = *most_resident = *most_committed = *faults = 1;
    *committed = 4096;
}

static void zone_statistics(void *zone, struct arena__zone_statistics *out) {
    CHECK(!zone);
    *out = (struct arena__zone_statistics){1, 100, 200, 300};
}

static void others_tell_what_they_can(void) {
    arena__figures f;
    uint64_t count;
    begin(ARENA_HEAP_MIMALLOC);
    CHECK(arena__heap_figures(&f) && all_unknown(&f));
    arena__heap_here()->mi_process_info = process_info;
    CHECK(arena__heap_figures(&f) && f.held == 4096 && f.used == ARENA__UNKNOWN);
    CHECK(arena__heap_count(&count) && count == ARENA__UNKNOWN);
    done();
    begin(ARENA_HEAP_MACOS);
    CHECK(arena__heap_figures(&f) && all_unknown(&f));
    arena__heap_here()->malloc_zone_statistics = zone_statistics;
    CHECK(arena__heap_figures(&f) && f.held == 300 && f.used == 100 && f.free == 200);
    done();
    begin(ARENA_HEAP_NONE);
    arena__heap_here()->mallinfo2 = large_info;
    arena__heap_here()->malloc_info = write_info;
    CHECK(arena__heap_figures(&f) && all_unknown(&f) && f.backend == ARENA_HEAP_NONE);
    CHECK(arena__heap_count(&count) && count == ARENA__UNKNOWN);
    done();
    begin(ARENA_HEAP_GLIBC);
    CHECK(arena__heap_figures(&f) && all_unknown(&f));
    done();
}

/* What a trim, or one that waits for readers, does to those who come. */
static int figures_in_a_walk, counts_in_a_walk;

static int walk_and_look(void) {
    arena__figures f;
    uint64_t count;
    figures_in_a_walk = arena__heap_figures(&f), counts_in_a_walk = arena__heap_count(&count);
    CHECK(all_unknown(&f) && count == ARENA__UNKNOWN);
    return 1;
}

static void nothing_is_asked_while_a_trim_runs(void) {
    arena__figures f;
    uint64_t count;
    arena_trimmed out;
    begin(ARENA_HEAP_GLIBC);
    arena__heap_here()->mallinfo2 = large_info;
    arena__heap_here()->malloc_info = write_info;
    arena__allocator true_one = *arena__allocator_here();
    *arena__allocator_here() = (arena__allocator){ARENA_HEAP_GLIBC, walk_and_look};
    figures_in_a_walk = counts_in_a_walk = -1;
    CHECK(arena_trim_all(0, UINT64_MAX, 0, &out) == ARENA_OK && out.heap == ARENA_TRIM_WALKED);
    CHECK(figures_in_a_walk == 0 && counts_in_a_walk == 0);
    *arena__allocator_here() = true_one;
    CHECK(arena__heap_figures(&f) && arena__heap_count(&count)); /* and each has ended */
    CHECK(arena_trim_all(0, UINT64_MAX, 0, &out) == ARENA_OK);
    done();
}

static int set_option, set_value;

static int set(int option, int value) {
    set_option = option, set_value = value;
    return value == 2;
}

static void settings_go_to_glibc_only(void) {
    begin(ARENA_HEAP_GLIBC);
    CHECK(!arena__heap_set(-8, 2));
    arena__heap_here()->mallopt = set;
    CHECK(arena__heap_set(-8, 2) && set_option == -8 && set_value == 2);
    CHECK(!arena__heap_set(-3, 5));
    arena__heap_here()->kind = ARENA_HEAP_JEMALLOC;
    set_option = 0;
    CHECK(!arena__heap_set(-8, 2) && set_option == 0);
    done();
}

static void the_true_figures_add_up(void) {
    arena__figures f, later;
    uint64_t count;
    char *volatile block = malloc(3 << 20);
    CHECK(block);
    CHECK(arena__heap_figures(&f) && arena__heap_count(&count));
    /* A checker's malloc is another, and Valgrind's hides behind the name of glibc's. */
    if (f.backend == ARENA_HEAP_GLIBC && !arena__valgrind(ARENA__VG_RUNNING, 0, 0, 0, 0)) {
        CHECK(f.used >= 3 << 20 && f.used + f.free <= f.held && f.mmapped <= f.used);
        CHECK(count >= 1 && count < 1000);
        free(block);
        CHECK(arena__heap_figures(&later) && later.used + (3 << 20) <= f.used);
    } else
        free(block);
}

static void *look(void *unused) {
    arena__figures f;
    uint64_t count;
    for (int i = 0; i < 50; i++) {
        char *volatile block = malloc(100000);
        free(block);
        CHECK(arena__heap_figures(&f) && arena__heap_count(&count));
    }
    return unused;
}

static void many_may_look_at_once(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, look, NULL) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(void) {
    RUN(glibc_counts_the_mmapped_apart);
    RUN(an_older_glibc_has_figures_that_wrap_and_they_are_not_negative);
    RUN(heaps_are_the_elements_of_a_text);
    RUN(jemalloc_is_asked_after_a_new_epoch);
    RUN(others_tell_what_they_can);
    RUN(nothing_is_asked_while_a_trim_runs);
    RUN(settings_go_to_glibc_only);
    RUN(the_true_figures_add_up);
    RUN(many_may_look_at_once);
    return 0;
}
