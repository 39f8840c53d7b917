/* test_trim.c: who may walk the heap, when, and what a fork in the middle of it leaves behind. */
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static _Atomic int walks, walking, most_at_once;
static _Atomic bool hold;

static int slow_walk(void) {
    int now = atomic_fetch_add(&walking, 1) + 1;
    if (now > atomic_load(&most_at_once)) atomic_store(&most_at_once, now);
    while (atomic_load(&hold)) usleep(200);
    atomic_fetch_sub(&walking, 1);
    return atomic_fetch_add(&walks, 1) + 1;
}

static arena__allocator true_one;

/* Under a checker malloc is the checker's, which has no way to give back: here it has. */
static void begin(bool held) {
    true_one = *arena__allocator_here();
    *arena__allocator_here() = (arena__allocator){ARENA_HEAP_GLIBC, slow_walk};
    atomic_store(&walks, 0), atomic_store(&most_at_once, 0), atomic_store(&hold, held);
}

static void done(void) {
    *arena__allocator_here() = true_one;
}

static void *trim_in_thread(void *out) {
    CHECK(arena_trim_all(0, UINT64_MAX, 0, out) == ARENA_OK);
    return NULL;
}

static void wait_for(bool (*fact)(void)) {
    while (!fact()) usleep(200);
}

static bool one_walks(void) {
    return atomic_load(&walking) == 1;
}

static bool three_wait(void) {
    return arena__trim_waiting() == 3;
}

static void a_tick(size_t size) {
    arena_tick *t = arena_begin("t");
    CHECK(t && arena_alloc(t, size));
    CHECK(arena_end(t) == ARENA_OK);
}

static void a_trim_gives_back_chunks_and_walks_the_heap(void) {
    begin(false);
    a_tick(3 << 20);
    CHECK(stats().cached > 3 << 20);
    arena_trimmed out;
    CHECK(arena_trim_all(0, UINT64_MAX, 0, &out) == ARENA_OK);
    CHECK(out.chunks > 3 << 20 && out.kept == 0 && stats().cached == 0);
    CHECK(out.backend == arena_heap_kind() && !out.shared);
    CHECK(out.heap == ARENA_TRIM_WALKED);
    CHECK(out.code == 1);
    CHECK(out.before > 0 && out.after > 0 && out.ns >= out.chunk_ns + out.heap_ns);
    CHECK(arena_trim_all(0, UINT64_MAX, 0, NULL) == ARENA_E_INVALID);
    done();
}

static void a_walk_that_is_predicted_to_be_too_long_is_left_out(void) {
    begin(false);
    arena_trimmed out;
    CHECK(arena_trim_all(0, 1000000, 1000001, &out) == ARENA_OK);
    CHECK(out.heap == ARENA_TRIM_TOO_DEAR);
    CHECK(arena_trim_all(0, 0, 1, &out) == ARENA_OK);
    CHECK(out.heap == ARENA_TRIM_TOO_DEAR);
    CHECK(atomic_load(&walks) == 0);
    done();
}

static void a_budget_ends_the_slices_and_the_walk(void) {
    begin(false);
    arena_tick *t = arena_begin("many");
    for (int i = 0; i < 5 * ARENA__SLICE; i++) CHECK(arena_alloc(t, ARENA__CHUNK_MAX - 200));
    CHECK(arena_end(t) == ARENA_OK);
    size_t cached = stats().cached;
    CHECK(cached >= 5 * ARENA__SLICE * ARENA__CHUNK_MAX);
    arena_trimmed out;
    CHECK(arena_trim_all(0, 1, 0, &out) == ARENA_OK); /* a nanosecond: one slice */
    CHECK(out.chunks == ARENA__SLICE * ARENA__CHUNK_MAX && out.kept == cached - out.chunks);
    CHECK(out.heap == ARENA_TRIM_TOO_DEAR);
    CHECK(arena_trim(0) == cached - out.chunks && stats().cached == 0);
    done();
}

static void keep_is_what_stays_cached(void) {
    a_tick(3 << 20);
    a_tick(100);
    size_t cached = stats().cached;
    arena_trimmed out;
    begin(false);
    CHECK(arena_trim_all(cached, UINT64_MAX, 0, &out) == ARENA_OK && out.chunks == 0);
    CHECK(arena_trim_all(ARENA__CHUNK_MIN, UINT64_MAX, 0, &out) == ARENA_OK);
    CHECK(out.kept == stats().cached && out.kept <= ARENA__CHUNK_MIN && out.kept > 0);
    done();
    arena_trim(0);
}

static void what_the_retention_wants_can_stay(void) {
    begin(false);
    arena_trim(0);
    for (int i = 0; i < 25; i++) a_tick(100000); /* a steady loop */
    size_t steady = stats().cached;
    CHECK(steady > 0);
    arena_trimmed out;
    CHECK(arena_trim_all(ARENA_TRIM_KEEP_RETAINED, UINT64_MAX, 0, &out) == ARENA_OK);
    CHECK(out.chunks == 0 && stats().cached == steady);
    done();
    arena_trim(0);
}

static void who_comes_meanwhile_gets_the_figures_of_the_one_that_runs(void) {
    begin(true);
    a_tick(3 << 20);
    pthread_t first, others[3];
    arena_trimmed one, more[3];
    CHECK(pthread_create(&first, NULL, trim_in_thread, &one) == 0);
    wait_for(one_walks);
    CHECK(!arena__sample_begin()); /* nobody reads figures of a heap that is walked */
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&others[i], NULL, trim_in_thread, &more[i]) == 0);
    wait_for(three_wait);
    atomic_store(&hold, false);
    CHECK(pthread_join(first, NULL) == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_join(others[i], NULL) == 0);
        CHECK(more[i].shared && more[i].run == one.run && more[i].chunks == one.chunks);
    }
    CHECK(!one.shared && one.chunks > 3 << 20);
    CHECK(atomic_load(&walks) == 1 && atomic_load(&most_at_once) == 1);
    CHECK(arena__sample_begin());
    arena__sample_end();
    done();
}

static void *sample_for_a_while(void *unused) {
    (void)unused;
    usleep(20000);
    CHECK(atomic_load(&walks) == 0);
    arena__sample_end();
    return NULL;
}

static void a_trim_waits_for_who_reads_the_figures(void) {
    begin(false);
    CHECK(arena__sample_begin() && arena__sample_begin());
    arena__sample_end();
    pthread_t reader;
    CHECK(pthread_create(&reader, NULL, sample_for_a_while, NULL) == 0);
    arena_trimmed out;
    CHECK(arena_trim_all(0, UINT64_MAX, 0, &out) == ARENA_OK);
    CHECK(atomic_load(&walks) == 1);
    CHECK(pthread_join(reader, NULL) == 0);
    done();
}

static void a_child_forked_in_the_middle_of_a_trim_can_trim(void) {
    begin(true);
    pthread_t first, waiter[3];
    arena_trimmed one, more[3];
    CHECK(pthread_create(&first, NULL, trim_in_thread, &one) == 0);
    wait_for(one_walks);
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&waiter[i], NULL, trim_in_thread, &more[i]) == 0);
    wait_for(three_wait);
    pid_t child = fork(); /* waits for nobody */
    CHECK(child >= 0);
    if (child == 0) {
        arena_trimmed mine;
        alarm(20);
        atomic_store(&hold, false);
        if (arena__trim_waiting() != 0) _exit(2);
        if (!arena__sample_begin()) _exit(3);
        arena__sample_end();
        if (arena_trim_all(0, UINT64_MAX, 0, &mine) != ARENA_OK || mine.shared) _exit(4);
        _exit(mine.heap == ARENA_TRIM_WALKED ? 0 : 5);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    atomic_store(&hold, false);
    CHECK(pthread_join(first, NULL) == 0);
    for (int i = 0; i < 3; i++) CHECK(pthread_join(waiter[i], NULL) == 0);
    done();
}

static void where_there_is_no_way_only_chunks_go(void) {
    begin(false);
    arena__allocator_here()->kind = ARENA_HEAP_NONE;
    a_tick(3 << 20);
    arena_trimmed out;
    CHECK(arena_trim_all(0, UINT64_MAX, 0, &out) == ARENA_OK);
    CHECK(out.heap == ARENA_TRIM_NO_HEAP && out.code == 0 && out.heap_ns == 0 && out.chunks > 3 << 20);
    CHECK(atomic_load(&walks) == 0);
    done();
}

static void the_true_walk_works(void) {
    arena_trimmed out;
    void *piece = malloc(1 << 16);
    CHECK(piece);
    free(piece);
    CHECK(arena_trim_all(0, UINT64_MAX, 0, &out) == ARENA_OK);
    CHECK(strcmp(arena_heap_name(arena_heap_kind()), "unknown") != 0);
    CHECK(strcmp(arena_heap_name(99), "unknown") == 0 && strcmp(arena_heap_name(-1), "unknown") == 0);
}

int main(void) {
    RUN(a_trim_gives_back_chunks_and_walks_the_heap);
    RUN(a_walk_that_is_predicted_to_be_too_long_is_left_out);
    RUN(a_budget_ends_the_slices_and_the_walk);
    RUN(keep_is_what_stays_cached);
    RUN(what_the_retention_wants_can_stay);
    RUN(who_comes_meanwhile_gets_the_figures_of_the_one_that_runs);
    RUN(a_trim_waits_for_who_reads_the_figures);
    RUN(a_child_forked_in_the_middle_of_a_trim_can_trim);
    RUN(where_there_is_no_way_only_chunks_go);
    RUN(the_true_walk_works);
    return 0;
}
