/* test_requests.c: ticks of a group: no thread's, large pieces in mappings of their own, a limit and
 * pins that are counted together. A mutex stands for the GIL, which orders the calls in Python.
 */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_mutex_t gil = PTHREAD_MUTEX_INITIALIZER;

static arena_tick *request(arena__group *group) {
    arena_tick *t = calloc(1, sizeof *t);
    CHECK(t);
    arena__group_open(t, group);
    return t;
}

static void gone(arena_tick *t) {
    if (arena__state(t) != ARENA__ENDED) (void)arena__tick_close(t);
    free(t);
}

static void large_pieces_go_back_and_small_ones_are_kept(void) {
    arena__group group;
    arena__group_init(&group, ARENA__UNLIMITED);
    (void)arena_trim(0);
    arena_stats before = stats();
    arena_tick *t = request(&group);
    CHECK(stats().ticks_open == before.ticks_open + 1);
    for (size_t size = (size_t)65 << 10; size < (size_t)6 << 20; size *= 3) CHECK(arena_zalloc(t, size));
    for (int i = 0; i < 10000; i++) CHECK(arena_alloc(t, 100)); /* a megabyte in small pieces */
    CHECK(stats().chunks > before.chunks + ((uint64_t)6 << 20));
    (void)arena__tick_close(t);
    arena_stats after = stats();
    CHECK(after.ticks_open == before.ticks_open && after.chunks == before.chunks);
    CHECK(after.cached <= before.cached + 2 * ARENA__CHUNK_MIN);
    free(t);

    t = request(&group); /* and the smallest chunk is used again */
    uint64_t maps = stats().maps;
    CHECK(arena_alloc(t, 100));
    CHECK(stats().maps == maps);
    gone(t);
}

static void a_string_grows_without_a_copy_of_itself(void) {
    arena__group group;
    arena__group_init(&group, ARENA__UNLIMITED);
    arena_tick *t = request(&group);
    arena_strbuf *buf = arena_strbuf_new(t, 0);
    static char piece[4096];
    for (unsigned i = 0; i < 2048; i++) {
        memset(piece, (int)(i % 251), sizeof piece);
        CHECK(arena_strbuf_append(buf, piece, sizeof piece) == ARENA_OK);
    }
    const char *data = arena_strbuf_data(buf);
    for (unsigned i = 0; i < 2048; i++) CHECK((unsigned char)data[i * 4096UL + 7] == i % 251);
    CHECK(arena_used(t) == (size_t)2048 * 4096);
    /* One mapping beside that of the record: what it grew out of has gone. */
    CHECK(stats().chunks <= (uint64_t)3 * 2048 * 4096);
    gone(t);
}

static void all_of_a_group_have_one_limit(void) {
    arena__group group;
    arena__group_init(&group, 1000);
    arena_tick *one = request(&group), *two = request(&group);
    CHECK(arena__cap(two, 600) == ARENA_OK);
    CHECK(arena_alloc(one, 500));
    CHECK(!arena_alloc(two, 501) && arena_error() == ARENA_E_LIMIT);
    CHECK(arena__self.refusal.by == &group.around && arena__self.refusal.used == 500);
    CHECK(arena_alloc(two, 500) && !arena_alloc(one, 1));
    CHECK(arena__self.refusal.by == &group.around && arena__self.refusal.used == 1000);
    CHECK(group.around.nested == 1000 && arena_used(&group.around) == 0);
    gone(one);
    CHECK(group.around.nested == 500);
    CHECK(!arena_alloc(two, 101) && arena__self.refusal.by == two);
    CHECK(arena_alloc(two, 100));
    gone(two);
    CHECK(group.around.nested == 0);
}

static void pins_are_counted_where_they_belong(void) {
    arena__group group, other;
    arena__group_init(&group, ARENA__UNLIMITED);
    arena__group_init(&other, ARENA__UNLIMITED);
    uint64_t pinned = stats().pinned;
    arena_tick *t = request(&group), *u = request(&other);
    arena__chunk *chunk, *second, *third;
    CHECK(arena__alloc_in(t, 100000, &chunk) && arena__alloc_in(t, 200000, &second));
    CHECK(arena__alloc_in(u, 100000, &third));
    arena__pin(chunk);
    arena__pin(chunk);
    arena__pin(third);
    CHECK(group.pinned == 0);
    size_t size = chunk->size;
    CHECK(arena__tick_close(t) == 1 && arena__tick_close(u) == 1);
    CHECK(group.pinned == size && group.pinned_count == 1 && stats().pinned > pinned + size);
    arena__unpin(chunk);
    CHECK(group.pinned == size && other.pinned_count == 1);
    arena__unpin(chunk);
    CHECK(group.pinned == 0 && group.pinned_count == 0 && other.pinned == size);
    arena__unpin(third);
    CHECK(other.pinned == 0 && stats().pinned == pinned);
    free(t), free(u);
}

/* ---- Threads ---------------------------------------------------------------------------------- */

enum { THREADS = 5, ROUNDS = 300, SHARED = 8 };
static arena__group shared_group;
static arena_tick *shared[SHARED];

static void *opener(void *arg) {
    *(arena_tick **)arg = request(&shared_group);
    CHECK(arena_strdup(*(arena_tick **)arg, "of a thread that has ended"));
    return NULL;
}

static void they_outlive_the_thread_that_opened_them(void) {
    arena__group_init(&shared_group, ARENA__UNLIMITED);
    uint64_t scratch = stats().scratch, open = stats().ticks_open;
    arena_tick *t = NULL;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, opener, &t) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(arena__state(t) == ARENA__OPEN && arena_used(t) == 27);
    CHECK(stats().ticks_open == open + 1);
    CHECK(arena_alloc(t, 100000)); /* this thread may go on with it, */
    gone(t);                       /* and end it */
    CHECK(stats().scratch == scratch && stats().ticks_open == open);
}

static void *user(void *arg) {
    unsigned seed = (unsigned)(uintptr_t)arg;
    for (unsigned i = 0; i < ROUNDS; i++) {
        unsigned n = (seed * 31 + i * 7) % SHARED;
        CHECK(pthread_mutex_lock(&gil) == 0);
        if (!shared[n]) shared[n] = request(&shared_group);
        void *p = arena_alloc(shared[n], (size_t)(i * 997 + seed) % 90000);
        CHECK(p || arena_error() == ARENA_E_LIMIT);
        if (i % 5 == 0) {
            gone(shared[n]);
            shared[n] = NULL;
        }
        CHECK(pthread_mutex_unlock(&gil) == 0);
        arena_tick *own = arena_begin("own"); /* which its thread's end sweeps, and nothing else */
        CHECK(arena_alloc(own, 100));
        if (i + 1 < ROUNDS) CHECK(arena_end(own) == ARENA_OK);
        CHECK(stats().ticks_open < 1 << 20);
    }
    return NULL;
}

static void many_threads_use_and_end_them(void) {
    arena__group_init(&shared_group, 1 << 20);
    arena_stats before = stats();
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, user, (void *)(i + 1)) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < SHARED; i++)
        if (shared[i]) gone(shared[i]);
    arena_stats after = stats();
    CHECK(after.ticks_open == before.ticks_open && after.scratch == before.scratch);
    CHECK(after.chunks == before.chunks && shared_group.around.nested == 0);
}

static void the_child_of_a_fork_has_them_all(void) {
    arena__group_init(&shared_group, ARENA__UNLIMITED);
    arena_tick *t = NULL, *own = request(&shared_group);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, opener, &t) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(arena_alloc(own, 100000));
    arena_stats before = stats();
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        arena_stats now = stats();
        CHECK(now.ticks_open == before.ticks_open && now.chunks == before.chunks);
        CHECK(!arena__tick_left_behind(t));
        CHECK(arena_alloc(t, 70000));
        gone(t), gone(own);
        CHECK(stats().ticks_open == before.ticks_open - 2);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(arena_used(t) == 27);
    gone(t), gone(own);
}

int main(void) {
    RUN(large_pieces_go_back_and_small_ones_are_kept);
    RUN(a_string_grows_without_a_copy_of_itself);
    RUN(all_of_a_group_have_one_limit);
    RUN(pins_are_counted_where_they_belong);
    RUN(they_outlive_the_thread_that_opened_them);
    RUN(many_threads_use_and_end_them);
    RUN(the_child_of_a_fork_has_them_all);
    return 0;
}
