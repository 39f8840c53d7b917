/* test_races.c: threads against each other, threads that end, forks in the middle of it. TSan looks on.
 *
 * Ticks as the Python types have them, on no C stack ("detached"), are made here from the parts that
 * csrc/python uses.
 */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 6, ROUNDS = 400 };
static _Atomic bool stop;

static arena_tick *detached_begin(arena_tick *around) {
    arena_tick *t = calloc(1, sizeof *t);
    CHECK(t);
    arena__tick_open(t, around);
    return t;
}

static void detached_end(arena_tick *t) {
    (void)arena__tick_close(t);
    free(t);
}

static void work(unsigned seed) {
    arena_tick *outer = arena_begin("outer"), *python = detached_begin(NULL);
    arena_limit(outer, 3 << 20);
    arena_tick *inner = arena_begin("inner");
    if (seed % 5 == 0) arena_wipe(inner);
    for (unsigned i = 0; i < 12; i++) {
        size_t size = (size_t)(seed * 7919 + i * 104729) % (i == 7 ? 5000000 : 70000);
        arena_tick *t = i % 3 == 0 ? outer : i % 3 == 1 ? inner : python;
        char *p = arena_zalloc(t, size);
        if (p && size) p[0] = p[size - 1] = (char)seed;
        CHECK(!p || !size || p[size / 2] == 0 || size < 3);
    }
    char *kept = arena_strdup_persist("kept");
    CHECK(arena_end(outer) == ARENA_OK);
    arena_free_persist(kept);
    detached_end(python);
}

static void *worker(void *arg) {
    for (unsigned i = 0; i < ROUNDS; i++) work((unsigned)(uintptr_t)arg * 1000 + i);
    return NULL;
}

/* Turns everything that is the process's, and reads all counters. */
static void *meddler(void *arg) {
    (void)arg;
    for (int i = 0; !atomic_load(&stop); i++) {
        arena_stats s = stats();
        CHECK(s.ticks_open < 1 << 20 && s.scratch < 1 << 30 && s.chunks < (uint64_t)1 << 40);
        CHECK(s.cached < (uint64_t)1 << 40 && s.persisted < 1 << 20);
        arena_trim((size_t)(i % 3) << 20);
        if (i % 7 == 0) arena_debug(i % 2 ? ARENA_DEBUG_FILL : 0);
        if (i % 11 == 0) arena_process_limit(i % 2 ? SIZE_MAX : (size_t)1 << 30);
    }
    arena_debug(0), arena_process_limit(SIZE_MAX);
    return NULL;
}

static void test_threads_allocate_while_others_trim_read_and_turn_the_dials(void) {
    pthread_t threads[THREADS], other;
    atomic_store(&stop, false);
    CHECK(!pthread_create(&other, NULL, meddler, NULL));
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, worker, (void *)i));
    for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
    atomic_store(&stop, true);
    CHECK(!pthread_join(other, NULL));
    arena_stats s = stats();
    CHECK(s.ticks_open == 0 && s.scratch == 0 && s.chunks == 0 && s.pinned == 0 && s.persisted == 0);
}

/* Views die in other threads than the one whose tick ends. */
static arena__chunk *_Atomic handed;
static void *unpinner(void *arg) {
    (void)arg;
    while (!atomic_load(&stop)) {
        arena__chunk *chunk = atomic_exchange(&handed, NULL);
        if (chunk) arena__unpin(chunk);
    }
    return NULL;
}

static void test_a_view_may_die_in_another_thread_while_its_tick_ends(void) {
    pthread_t other;
    atomic_store(&stop, false);
    CHECK(!pthread_create(&other, NULL, unpinner, NULL));
    for (int i = 0; i < 3000; i++) {
        arena_tick *t = arena_begin("pinned");
        if (i % 4 == 0) arena_wipe(t);
        arena__chunk *chunk;
        char *p = arena__alloc_in(t, i % 9 ? 1000 : 5 << 20, &chunk);
        p[0] = 'p';
        arena__pin(chunk);
        arena__chunk *before = atomic_exchange(&handed, chunk);
        if (before) arena__unpin(before);
        arena__pin(chunk), arena__unpin(chunk);
        arena_end(t);
    }
    while (atomic_load(&handed)) continue;
    atomic_store(&stop, true);
    CHECK(!pthread_join(other, NULL));
    CHECK(stats().pinned == 0 && stats().pinned_count == 0 && stats().chunks == 0);
}

/* A thread that ends with ticks open. Their records stay with whoever holds them. */
static arena_tick *left[3];
static arena__chunk *left_chunk;
static char *left_text;
static void *leaver(void *arg) {
    (void)arg;
    left[0] = detached_begin(NULL);
    arena_limit(left[0], 10 << 20);
    left[1] = detached_begin(left[0]);
    left[2] = detached_begin(NULL); /* holds nothing */
    arena_wipe(left[1]);
    memset(arena_alloc(left[0], 500000), 'a', 500000);
    left_text = arena__alloc_in(left[1], 100, &left_chunk);
    memset(left_text, 'b', 100);
    arena__pin(left_chunk);
    arena_begin("on the C stack");
    CHECK(arena_alloc(NULL, 3 << 20));
    return NULL;
}

static void test_a_thread_that_ends_gives_the_memory_of_its_ticks_back(void) {
    arena_stats before = stats();
    CHECK(arena_process_limit((size_t)1 << 30) == ARENA_OK);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, leaver, NULL) && !pthread_join(thread, NULL));
    arena_stats after = stats();
    CHECK(after.chunks == before.chunks && after.scratch == before.scratch);
    CHECK(after.ticks_open == before.ticks_open + 1 && after.pinned_count == 1);
    CHECK(left_text[0] == 'b' && left_text[99] == 'b');
    CHECK(!arena_alloc(left[0], 1) && arena_error() == ARENA_E_ENDED && arena_used(left[0]) == 0);
    arena__unpin(left_chunk);
    for (int i = 0; i < 3; i++) detached_end(left[i]);
    CHECK(stats().ticks_open == before.ticks_open && stats().pinned_count == 0);
    CHECK(arena_process_limit(1) == ARENA_OK); /* nothing is counted as held any more */
    CHECK(arena_process_limit(SIZE_MAX) == ARENA_OK);
}

/* Its objects are let go of at the same time. */
static arena_tick *_Atomic offered;
static void *short_lived(void *arg) {
    (void)arg;
    arena_tick *t = detached_begin(NULL);
    CHECK(arena_alloc(t, 100000));
    atomic_store(&offered, t);
    return NULL;
}

static void test_a_record_may_be_let_go_of_while_its_thread_ends(void) {
    for (int i = 0; i < 300; i++) {
        pthread_t thread;
        atomic_store(&offered, NULL);
        CHECK(!pthread_create(&thread, NULL, short_lived, NULL));
        arena_tick *t;
        while (!(t = atomic_load(&offered))) continue;
        detached_end(t);
        CHECK(!pthread_join(thread, NULL));
    }
    CHECK(stats().ticks_open == 0 && stats().chunks == 0 && stats().scratch == 0);
}

/* In the child: what of other threads was open is gone, what is this thread's goes on. */
static void child(arena_tick *mine, const char *text, arena_tick *python) {
    arena_stats s = stats();
    CHECK(s.ticks_open == 2 && s.scratch == arena_used(mine) + arena_used(python));
    CHECK(!strcmp(text, "mine") && arena_alloc(mine, 100000) && arena_alloc(python, 200000));
    work(1);
    CHECK(arena_end(mine) == ARENA_OK);
    detached_end(python);
    s = stats();
    CHECK(s.ticks_open == 0 && s.scratch == 0 && s.chunks == 0);
    CHECK(arena_process_limit(s.persisted) == ARENA_OK && arena_process_limit(SIZE_MAX) == ARENA_OK);
    if (arena__tick_left_behind(mine)) abort();
    arena_trim(0);
    CHECK(stats().cached == 0);
    _exit(0);
}

static void *trimmer(void *arg) {
    (void)arg;
    while (!atomic_load(&stop)) arena_trim(0);
    return NULL;
}

static void *forker(void *arg) {
    (void)arg;
    for (int i = 0; i < 60; i++) {
        arena_tick *mine = arena_begin("mine"), *python = detached_begin(NULL);
        char *text = arena_strdup(mine, "mine");
        CHECK(arena_alloc(python, 5000));
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (!pid) child(mine, text, python);
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        CHECK(!strcmp(text, "mine") && arena_end(mine) == ARENA_OK);
        detached_end(python);
    }
    return NULL;
}

static void *endless(void *arg) {
    for (unsigned i = 0; !atomic_load(&stop); i++) work((unsigned)(uintptr_t)arg + i);
    return NULL;
}

static void test_a_child_ends_its_own_ticks_whatever_other_threads_were_doing(void) {
    pthread_t busy[2], trims, forks;
    atomic_store(&stop, false);
    for (uintptr_t i = 0; i < 2; i++) CHECK(!pthread_create(&busy[i], NULL, endless, (void *)i));
    CHECK(!pthread_create(&trims, NULL, trimmer, NULL));
    CHECK(!pthread_create(&forks, NULL, forker, NULL) && !pthread_join(forks, NULL));
    atomic_store(&stop, true);
    CHECK(!pthread_join(busy[0], NULL) && !pthread_join(busy[1], NULL));
    CHECK(!pthread_join(trims, NULL));
    CHECK(stats().ticks_open == 0 && stats().chunks == 0);
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0); /* a forked child has nothing to print again */
    RUN(test_threads_allocate_while_others_trim_read_and_turn_the_dials);
    RUN(test_a_view_may_die_in_another_thread_while_its_tick_ends);
    RUN(test_a_thread_that_ends_gives_the_memory_of_its_ticks_back);
    RUN(test_a_record_may_be_let_go_of_while_its_thread_ends);
    RUN(test_a_child_ends_its_own_ticks_whatever_other_threads_were_doing);
    return 0;
}
