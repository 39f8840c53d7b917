/* test_limits.c: limits of ticks, of ticks around them, and of the process: exact to the byte. */
#include "check.h"

#include <pthread.h>

static void test_an_inner_ticks_bytes_count_for_every_limit_around_it(void) {
    arena_tick *a = arena_begin("a");
    CHECK(arena_limit(a, 1000) == ARENA_OK && arena_alloc(a, 100));
    arena_tick *b = arena_begin("b"), *c = arena_begin("c");
    CHECK(arena_limit(c, 500) == ARENA_OK);
    CHECK(arena_alloc(b, 300) && arena_alloc(c, 500));
    CHECK(arena_used(a) == 100 && arena_used(b) == 300 && arena_used(c) == 500);
    CHECK(!arena_alloc(c, 1) && arena_error() == ARENA_E_LIMIT && arena__self.refusal.by == c);
    CHECK(arena__self.refusal.used == 500 && arena__self.refusal.limit == 500);
    CHECK(!arena_alloc(b, 101) && arena_error() == ARENA_E_LIMIT && arena__self.refusal.by == a);
    CHECK(arena__self.refusal.used == 900 && arena__self.refusal.limit == 1000);
    CHECK(!arena_alloc(a, 101) && arena_alloc(a, 100) && !arena_alloc(a, 1) && !arena_alloc(b, 1));
    CHECK(arena_limit(a, 999) == ARENA_E_INVALID && arena_limit(a, 1001) == ARENA_OK);
    CHECK(arena_alloc(b, 1) && !arena_alloc(b, 1));
    arena_end(c);
    CHECK(!arena_alloc(a, 501) && arena_alloc(a, 500) && !arena_alloc(b, 1));
    arena_end(b);
    CHECK(!arena_alloc(a, 302) && arena_alloc(a, 301) && !arena_alloc(a, 1));
    CHECK(arena_used(a) == 1001);
    arena_end(a);
    CHECK(stats().scratch == 0);
}

static void test_a_limit_that_comes_late_counts_the_ticks_that_are_open_inside(void) {
    arena_tick *a = arena_begin("a"), *b = arena_begin("b"), *c = arena_begin("c");
    CHECK(arena_alloc(a, 10) && arena_alloc(b, 20) && arena_alloc(c, 30));
    CHECK(arena_limit(a, 59) == ARENA_E_INVALID && arena_limit(a, 60) == ARENA_OK);
    CHECK(!arena_alloc(c, 1) && !arena_alloc(b, 1) && !arena_alloc(a, 1));
    CHECK(arena_limit(b, 50) == ARENA_OK && arena_limit(a, 65) == ARENA_OK);
    CHECK(!arena_alloc(c, 1) && arena__self.refusal.by == b && arena_alloc(a, 5));
    CHECK(arena_limit(b, SIZE_MAX) == ARENA_OK && arena_limit(a, SIZE_MAX) == ARENA_OK);
    CHECK(arena_alloc(c, 100000) && arena_alloc(b, 100000) && arena_alloc(a, 100000));
    arena_end(a);
    CHECK(stats().scratch == 0 && stats().chunks == 0);
}

static void test_strings_and_reallocs_are_charged_and_refunded_through_all_limits(void) {
    arena_tick *a = arena_begin("a");
    arena_limit(a, 1000);
    arena_tick *b = arena_begin("b");
    arena_strbuf *s = arena_strbuf_new(b, 0);
    for (int i = 0; i < 1000; i++) CHECK(arena_strbuf_append(s, "x", 1) == ARENA_OK);
    CHECK(arena_strbuf_append(s, "x", 1) == ARENA_E_LIMIT && arena_strbuf_len(s) == 1000);
    CHECK(arena_strbuf_printf(s, "%d", 1) == ARENA_E_LIMIT && arena_strbuf_append(s, "", 0) == 0);
    CHECK(arena_strbuf_truncate(s, 400) == ARENA_OK && !arena_alloc(a, 601));
    void *p = arena_alloc(a, 600), *q = arena_realloc(a, p, 600, 500);
    CHECK(p == q && arena_realloc(b, NULL, 0, 101) == NULL);
    q = arena_realloc(b, NULL, 0, 60);
    CHECK(arena_realloc(b, q, 60, 101) == NULL && arena_error() == ARENA_E_LIMIT);
    CHECK(arena_realloc(b, q, 60, 100) && arena_used(b) == 500 && !arena_alloc(b, 1));
    CHECK(arena_strbuf_clear(s) == ARENA_OK && arena_used(b) == 100 && arena_alloc(b, 400));
    arena_end(a);
    CHECK(stats().scratch == 0);
}

static void in_cleanup(void *arg) {
    arena_tick *a = arg, *own = arena_begin("own");
    CHECK(!arena_alloc(own, 901) && arena__self.refusal.by == a && arena_alloc(own, 900));
    arena_end(own);
}

static void test_a_tick_that_ends_still_counts_for_those_around_it_until_it_is_over(void) {
    arena_tick *a = arena_begin("a");
    arena_limit(a, 1000);
    arena_tick *b = arena_begin("b");
    CHECK(arena_alloc(b, 100) && arena_cleanup(b, in_cleanup, a) == ARENA_OK);
    arena_end(b);
    CHECK(arena_alloc(a, 1000) && !arena_alloc(a, 1));
    arena_end(a);
}

static void limits_the_outer(void *arg) {
    arena_tick *a = arg;
    CHECK(arena_limit(a, 99) == ARENA_E_INVALID && arena_limit(a, 120) == ARENA_OK);
    arena_tick *own = arena_begin("own");
    CHECK(!arena_alloc(own, 21) && arena_alloc(own, 20));
    arena_end(own);
}

static void test_a_limit_that_a_cleanup_sets_counts_the_tick_that_is_ending(void) {
    arena_tick *a = arena_begin("a"), *b = arena_begin("b");
    CHECK(arena_alloc(b, 100) && arena_cleanup(b, limits_the_outer, a) == ARENA_OK);
    arena_end(b);
    CHECK(arena_alloc(a, 120) && !arena_alloc(a, 1));
    arena_end(a);
}

static void test_a_tick_that_held_nothing_when_the_process_got_its_limit_is_under_it(void) {
    arena_tick *t = arena_begin("nothing yet");
    CHECK(arena_process_limit(64) == ARENA_OK);
    arena_strbuf *s = arena_strbuf_new(t, 0); /* takes a chunk, and asks for nothing */
    CHECK(s && !arena_alloc(t, 65) && arena_error() == ARENA_E_LIMIT && arena_alloc(t, 60));
    CHECK(arena_strbuf_puts(s, "five!") == ARENA_E_LIMIT && !arena_strbuf_puts(s, "four"));
    arena_end(t);
    CHECK(arena_process_limit(SIZE_MAX) == ARENA_OK);
}

static void test_the_process_has_a_limit_for_scratch_persisted_memory_and_strays(void) {
    arena_tick *old = arena_begin("open before");
    CHECK(stats().limit == UINT64_MAX && arena_alloc(old, 100));
    char *kept = arena_strdup_persist("kept"), *stray;
    CHECK(arena_process_limit(104) == ARENA_E_INVALID && arena_error() == ARENA_E_INVALID);
    CHECK(stats().limit == UINT64_MAX && arena_process_limit(1000) == ARENA_OK);
    CHECK(stats().limit == 1000);
    CHECK(!arena_alloc(old, 896) && arena_error() == ARENA_E_LIMIT && !arena__self.refusal.by);
    CHECK(arena__self.refusal.used == 105 && arena__self.refusal.limit == 1000);
    arena_tick *t = arena_begin("after");
    CHECK(arena_alloc(t, 795) && arena_alloc(old, 100) && !arena_alloc(t, 1));
    CHECK(!arena_alloc_persist(1) && arena_error() == ARENA_E_LIMIT);
    CHECK(!arena_strbuf_new_persist(0) && arena_error() == ARENA_E_LIMIT);
    arena_end(t);
    CHECK(arena_alloc_persist(796) == NULL);
    kept = arena_realloc_persist(kept, 800);
    CHECK(kept && !arena_alloc(old, 1) && !arena_realloc_persist(kept, 801));
    CHECK(arena_error() == ARENA_E_LIMIT && arena_size_persist(kept) == 800);
    kept = arena_realloc_persist(kept, 10);
    CHECK(!arena_alloc(old, 791) && arena_alloc(old, 790) && arena_used(old) == 990);
    arena_free_persist(kept);
    arena_end(old);
    arena_strbuf *s = arena_strbuf_new_persist(0);
    while (arena_strbuf_puts(s, "0123456789") == ARENA_OK) continue;
    CHECK(arena_error() == ARENA_E_LIMIT && arena_strbuf_len(s) % 10 == 0);
    CHECK(stats().persisted <= 1000 && arena_strbuf_len(s) > 900);
    arena_free_persist(s);
    stray = arena_alloc(NULL, 1000);
    CHECK(stray && !arena_alloc(NULL, 1) && arena_error() == ARENA_E_LIMIT);
    arena_free_persist(stray);
    CHECK(arena_process_limit(SIZE_MAX) == ARENA_OK && stats().limit == UINT64_MAX);
    t = arena_begin("no limit");
    CHECK(arena_alloc(t, 10 << 20));
    CHECK(!arena_alloc_persist(SIZE_MAX / 2) && arena_error() == ARENA_E_NOMEM);
    arena_end(t);
    CHECK(stats().scratch == 0 && stats().persisted == 0 && stats().strays == 0);
}

static void *no_resize(void *old, size_t size) {
    (void)old, (void)size;
    return NULL;
}

static void test_persisted_memory_that_cannot_be_had_counts_for_nobody(void) {
    void *(*real)(void *, size_t) = arena__system.resize;
    CHECK(arena_process_limit(1000) == ARENA_OK);
    char *kept = arena_alloc_persist(100), *rest;
    arena__system.resize = no_resize;
    CHECK(!arena_alloc_persist(500) && arena_error() == ARENA_E_NOMEM);
    CHECK(!arena_realloc_persist(kept, 600) && arena_error() == ARENA_E_NOMEM);
    arena__system.resize = real;
    CHECK(arena_size_persist(kept) == 100 && !arena_alloc_persist(901));
    CHECK(arena_error() == ARENA_E_LIMIT && (rest = arena_alloc_persist(900)) != NULL);
    arena_free_persist(kept), arena_free_persist(rest);
    CHECK(arena_process_limit(SIZE_MAX) == ARENA_OK);
}

enum { THREADS = 8, LIMIT = 100000 };
static _Atomic size_t together;

/* What all threads hold never passes the limit: each counts before it lets go. */
static void *race(void *arg) {
    (void)arg;
    for (int i = 0; i < 3000; i++) {
        arena_tick *t = arena_begin("race");
        size_t mine = 0;
        for (size_t size = 1; size < 40000; size = size * 3 + 1) {
            void *p = i % 3 ? arena_alloc(t, size) : NULL;
            if (p) mine += size;
        }
        char *kept = arena_alloc_persist(50);
        if (kept) mine += 50;
        CHECK(atomic_fetch_add(&together, mine) + mine <= LIMIT);
        atomic_fetch_sub(&together, mine);
        arena_free_persist(kept);
        arena_end(t);
    }
    return NULL;
}

static void test_threads_together_never_pass_the_limit_of_the_process(void) {
    pthread_t threads[THREADS];
    CHECK(arena_process_limit(LIMIT) == ARENA_OK);
    for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, race, NULL));
    for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
    arena_tick *t = arena_begin("exact again");
    CHECK(!arena_alloc(t, LIMIT + 1) && arena_alloc(t, LIMIT));
    arena_end(t);
    CHECK(arena_process_limit(SIZE_MAX) == ARENA_OK);
}

int main(void) {
    RUN(test_an_inner_ticks_bytes_count_for_every_limit_around_it);
    RUN(test_a_limit_that_comes_late_counts_the_ticks_that_are_open_inside);
    RUN(test_strings_and_reallocs_are_charged_and_refunded_through_all_limits);
    RUN(test_a_tick_that_ends_still_counts_for_those_around_it_until_it_is_over);
    RUN(test_a_limit_that_a_cleanup_sets_counts_the_tick_that_is_ending);
    /* From the first limit of the process on, every tick is strict from its begin. */
    RUN(test_the_process_has_a_limit_for_scratch_persisted_memory_and_strays);
    RUN(test_a_tick_that_held_nothing_when_the_process_got_its_limit_is_under_it);
    RUN(test_persisted_memory_that_cannot_be_had_counts_for_nobody);
    RUN(test_threads_together_never_pass_the_limit_of_the_process);
    return 0;
}
