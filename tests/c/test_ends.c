/* test_ends.c: what becomes of memory that ends: wiped, filled, kept out of use, made to fault; and
 * what AddressSanitizer and Valgrind then say of C code that touches it.
 *
 * `test_ends touch WHAT` makes one mistake on purpose; the tests run it, and expect it to die.
 */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *program;

/* What the system is given back, before it is gone. */
static void (*real_unmap)(void *, size_t);
static size_t unmapped, not_zero;
static void watching_unmap(void *start, size_t size) {
    const unsigned char *bytes = start;
    unmapped++;
    for (size_t i = ARENA__HEAD; i < size; i++) not_zero += bytes[i] != 0;
    real_unmap(start, size);
}

static void secrets(arena_tick *t, char **keep, arena__chunk **chunk) {
    memset(arena_alloc(t, 100), 's', 100);
    *keep = arena__alloc_in(t, 1000, chunk);
    memset(*keep, 's', 1000);
    arena_strbuf *buf = arena_strbuf_new(t, 0); /* leaves copies behind as it moves */
    for (int i = 0; i < 9000; i++) {
        CHECK(arena_strbuf_puts(buf, "secret ") == ARENA_OK);
        if (i % 100 == 0) memset(arena_alloc(t, 100), 's', 100);
    }
    memset(arena_alloc(t, 1000000), 's', 1000000);
    memset(arena_alloc(t, 6 << 20), 's', 6 << 20);
    void *p = arena_alloc(t, 100000);
    memset(p, 's', 100000);
    p = arena_realloc(t, p, 100000, 900000); /* moves, and gives its chunk back at once */
    CHECK(p);
    memset((char *)p + 100000, 's', 800000);
}

static void test_a_wiped_tick_leaves_nothing_in_any_chunk_also_pinned_ones(void) {
    for (int pinned = 0; pinned < 2; pinned++) {
        arena_trim(0);
        arena_tick *t = arena_begin("wipe");
        char *keep;
        arena__chunk *chunk;
        CHECK(arena_wipe(t) == ARENA_OK);
        real_unmap = arena__system.unmap;
        arena__system.unmap = watching_unmap;
        unmapped = not_zero = 0;
        secrets(t, &keep, &chunk);
        if (pinned) arena__pin(chunk);
        CHECK(arena_end(t) == ARENA_OK && unmapped == 1);
        if (pinned) {
            for (int i = 0; i < 1000; i++) CHECK(keep[i] == 's');
            arena__unpin(chunk);
            CHECK(unmapped == 2);
        }
        CHECK(arena_trim(0) > 0 && unmapped > 3);
        arena__system.unmap = real_unmap;
        CHECK(not_zero == 0);
    }
    arena_tick *t = arena_begin("not wiped");
    char *keep;
    arena__chunk *chunk;
    arena__system.unmap = watching_unmap;
    secrets(t, &keep, &chunk);
    arena_end(t), arena_trim(0);
    arena__system.unmap = real_unmap;
    CHECK(not_zero > 9000 * 7 + 100000 + 900000); /* the test would have seen it */
    CHECK(arena_wipe(t) == ARENA_E_ENDED && arena_wipe(NULL) == ARENA_E_ENDED);
}

/* As the Python types have them: on no C stack. */
static void *leaves_secrets(void *arg) {
    arena__tick_open(arg, NULL);
    CHECK(arena_wipe(arg) == ARENA_OK);
    memset(arena_alloc(arg, 5000), 's', 5000);
    memset(arena_alloc(arg, 6 << 20), 's', 6 << 20);
    return NULL;
}

static void test_a_wiped_tick_whose_thread_ends_leaves_nothing(void) {
    pthread_t thread;
    arena_tick *t = calloc(1, sizeof *t);
    arena_trim(0);
    unmapped = not_zero = 0;
    arena__system.unmap = watching_unmap;
    CHECK(t && !pthread_create(&thread, NULL, leaves_secrets, t) && !pthread_join(thread, NULL));
    arena__system.unmap = real_unmap;
    CHECK(unmapped == 2 && not_zero == 0);
    (void)arena__tick_close(t);
    free(t);
}

static void test_blocks_are_zeroed_also_in_chunks_that_were_wiped_or_filled(void) {
    for (int round = 0; round < 12; round++) {
        arena_tick *t = arena_begin("dirt");
        if (round % 3 == 1) arena_wipe(t);
        CHECK(arena_debug(round % 4 == 2 ? ARENA_DEBUG_FILL : 0) >= 0);
        for (int i = 1; i < 40; i++) {
            size_t size = (size_t)i * (round % 2 ? 97 : 3001);
            unsigned char *p = arena_zalloc(t, size);
            for (size_t j = 0; j < size; j++) CHECK(p[j] == 0);
            memset(p, 0xAB, size);
        }
        arena_end(t);
    }
    CHECK(arena_debug(0) >= 0 && arena_debug_now() == 0);
}

static void test_the_words_of_the_dial(void) {
    CHECK(arena_debug_words("fill") == ARENA_DEBUG_FILL && arena_debug_words("") == 0);
    CHECK(arena_debug_words("guard,fill,noreuse") == 7 && arena_debug_words(NULL) == 0);
    static const char *wrong[] = {"f", "fills", "fill,", ",fill", "fill,,guard", "fill guard", "8"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(arena_debug_words(wrong[i]) == ARENA_E_INVALID);
    CHECK(arena_debug(8) == ARENA_E_INVALID && arena_debug(-1) == ARENA_E_INVALID);
    CHECK(arena_debug(ARENA_DEBUG_FILL) == 0 && arena_debug(0) == ARENA_DEBUG_FILL);
}

/* Only where no checker forbids to look at ended memory. */
static void test_ended_memory_is_filled_and_not_used_again(void) {
    if (arena__checked()) return;
    arena_trim(0);
    CHECK(arena_debug(ARENA_DEBUG_FILL | ARENA_DEBUG_NOREUSE) == 0);
    arena_stats before = stats();
    arena_tick *t = arena_begin("t");
    unsigned char *volatile p = arena_alloc(t, 5000), *volatile big = arena_alloc(t, 5 << 20);
    memset(p, 'x', 5000), memset(big, 'x', 5 << 20);
    arena__chunk *chunk;
    unsigned char *volatile viewed = arena__alloc_in(t, 100000, &chunk);
    memset(viewed, 'v', 100000);
    arena__pin(chunk);
    arena_end(t);
    for (int i = 0; i < 5000; i++) CHECK(p[i] == ARENA__FILL);
    for (int i = 0; i < 5 << 20; i++) CHECK(big[i] == ARENA__FILL);
    for (int i = 0; i < 100000; i++) CHECK(viewed[i] == 'v');
    arena__unpin(chunk);
    for (int i = 0; i < 100000; i++) CHECK(viewed[i] == ARENA__FILL);
    for (int i = 0; i < 100; i++) {
        t = arena_begin("others");
        memset(arena_alloc(t, 5000), 'y', 5000);
        arena_end(t);
    }
    for (int i = 0; i < 5000; i++) CHECK(p[i] == ARENA__FILL);
    CHECK(stats().cached == 0 && stats().unmaps == before.unmaps);
    CHECK(stats().retired - before.retired >= (5 << 20) + 102 * (64 << 10));
    CHECK(arena_debug(0) == (ARENA_DEBUG_FILL | ARENA_DEBUG_NOREUSE));
    for (int i = 0; i < 3; i++) { /* and as before once it is off */
        t = arena_begin("reuse");
        CHECK(arena_alloc(t, 10));
        arena_end(t);
    }
    CHECK(stats().cached == 64 << 10);
}

/* Its pages do not move: a pointer into the old place is not to find others there. */
static void test_a_large_string_that_grows_leaves_its_old_place_out_of_use(void) {
    arena_tick *t = arena_begin("leaves a chunk in the cache");
    CHECK(arena_alloc(t, 1) && arena_end(t) == ARENA_OK && stats().cached > 0);
    CHECK(arena_debug(ARENA_DEBUG_NOREUSE) == 0 && stats().cached == 0);
    uint64_t retired = stats().retired;
    t = arena_begin("t");
    arena_strbuf *s = arena_strbuf_new(t, 5 << 20);
    CHECK(arena_strbuf_puts(s, "text") == ARENA_OK);
    const char *volatile old = arena_strbuf_data(s);
    char *more = calloc(1, 6 << 20);
    CHECK(more && arena_strbuf_append(s, more, 6 << 20) == ARENA_OK);
    free(more);
    CHECK(arena_strbuf_data(s) != old && stats().retired - retired >= 5 << 20);
    if (!arena__checked()) CHECK(!strcmp(old, "text"));
    arena_end(t);
    CHECK(arena_debug(0) == ARENA_DEBUG_NOREUSE);
}

/* Mistakes. Each must stop the program when something watches. */
static void touch(const char *what) {
    arena_tick *t = arena_begin("touched"), *u;
    char *volatile p = arena_alloc(t, 100), *volatile big = arena_alloc(t, 5000001);
    arena_strbuf *s = arena_strbuf_new(t, 0);
    arena_strbuf_puts(s, "text");
    memset(p, 'a', 100), memset(big, 'b', 50000);
    if (!strcmp(what, "nothing")) {
        big[0] = big[5000000] = p[99] = 'x';
    } else if (!strcmp(what, "past the end")) {
        p[100] = 'x';
    } else if (!strcmp(what, "past an oversize block")) {
        big[5000016] = 'x';
    } else if (!strcmp(what, "ended")) {
        arena_end(t);
        p[5] = 'x';
    } else if (!strcmp(what, "ended oversize")) {
        arena_end(t);
        big[5] = 'x';
    } else if (!strcmp(what, "ended and used again")) {
        arena_end(t);
        u = arena_begin("next");
        CHECK(arena_alloc(u, 16));
        p[50] = 'x';
    } else if (!strcmp(what, "moved string")) {
        const char *volatile old = arena_strbuf_data(s);
        for (int i = 0; i < 20; i++) arena_strbuf_append(s, big, 50000);
        old = arena_strbuf_data(s);
        for (int i = 0; i < 140; i++) arena_strbuf_append(s, big, 50000);
        if (old[3] != '?') putchar(' ');
    }
    printf("alive %c\n", p[0]);
}

static int status_of(const char *what, const char *dial) {
    char command[500];
    fflush(stdout);
    snprintf(command, sizeof command, "ARENA_DEBUG=%s %s touch '%s' >/dev/null 2>&1", dial, program,
             what);
    return system(command);
}

static void test_a_guard_stops_what_touches_ended_memory(void) {
    static const char *caught[] = {"past an oversize block", "ended", "ended oversize",
                                   "ended and used again", "moved string"};
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) CHECK(status_of(caught[i], "guard") != 0);
    CHECK(status_of("nothing", "guard") == 0 && status_of("nothing", "") == 0);
    CHECK(status_of("nothing", "fill,noreuse,guard") == 0);
}

static void test_a_checker_stops_what_touches_memory_that_was_not_asked_for(void) {
    static const char *caught[] = {"past the end", "past an oversize block", "ended",
                                   "ended oversize", "ended and used again", "moved string"};
    if (!arena__checked()) return;
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) CHECK(status_of(caught[i], "") != 0);
    CHECK(status_of("nothing", "") == 0);
}

static void test_a_guard_keeps_views_and_gives_memory_back(void) {
    CHECK(arena_debug(ARENA_DEBUG_GUARD) == 0);
    uint64_t chunks = stats().chunks;
    for (int i = 0; i < 30; i++) {
        arena_tick *t = arena_begin("guarded");
        arena__chunk *small, *large;
        size_t size = (5 << 20) + (size_t)i;
        char *p = arena__alloc_in(t, 1000, &small), *q = arena__alloc_in(t, size, &large);
        memset(p, 'p', 1000), memset(q, 'q', size);
        CHECK((uintptr_t)p % 16 == 0 && (uintptr_t)q % 16 == 0);
        arena_strbuf *buf = arena_strbuf_new(t, 0);
        for (int k = 0; k < 60; k++) CHECK(!arena_strbuf_append(buf, q, 100000));
        arena__pin(small), arena__pin(large);
        arena_end(t);
        CHECK(p[999] == 'p' && q[0] == 'q' && q[size - 1] == 'q');
        arena__unpin(small), arena__unpin(large);
    }
    CHECK(stats().chunks == chunks && stats().pinned == 0 && arena_debug(0) == ARENA_DEBUG_GUARD);
    CHECK(stats().retired > (uint64_t)30 * (16 << 20) / 2);
}

static bool failing_seal(void *start, size_t size) {
    (void)start, (void)size;
    return false;
}

static void test_a_guard_that_cannot_be_had_is_no_memory_and_an_end_gives_back(void) {
    bool (*real)(void *, size_t) = arena__system.seal;
    arena_debug(ARENA_DEBUG_GUARD);
    arena__system.seal = failing_seal;
    arena_stats before = stats();
    arena_tick *t = arena_begin("t");
    CHECK(!arena_alloc(t, 5 << 20) && arena_error() == ARENA_E_NOMEM && arena_used(t) == 0);
    CHECK(arena_alloc(t, 100));
    arena_end(t);
    arena__system.seal = real;
    CHECK(stats().unmaps == before.unmaps + 1 && stats().retired == before.retired);
    arena_debug(0);
}

int main(int count, char **args) {
    program = args[0];
    if (count == 3 && !strcmp(args[1], "touch")) {
        touch(args[2]);
        return 0;
    }
    setvbuf(stdout, NULL, _IONBF, 0);
    RUN(test_a_wiped_tick_leaves_nothing_in_any_chunk_also_pinned_ones);
    RUN(test_a_wiped_tick_whose_thread_ends_leaves_nothing);
    RUN(test_blocks_are_zeroed_also_in_chunks_that_were_wiped_or_filled);
    RUN(test_the_words_of_the_dial);
    RUN(test_ended_memory_is_filled_and_not_used_again);
    RUN(test_a_large_string_that_grows_leaves_its_old_place_out_of_use);
    RUN(test_a_guard_stops_what_touches_ended_memory);
    RUN(test_a_checker_stops_what_touches_memory_that_was_not_asked_for);
    RUN(test_a_guard_keeps_views_and_gives_memory_back);
    RUN(test_a_guard_that_cannot_be_had_is_no_memory_and_an_end_gives_back);
    return 0;
}
