/* test_core.c: the C core on its own: no Python, built with sanitizers by tests/c/run.
 *
 * Each check is of the public API's contract, except where the core is made to fail by giving it an
 * operating system of the test's own (arena__system).
 */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wchar.h>

static volatile size_t huge = SIZE_MAX; /* the compiler refuses to see such a size */

static void test_allocations_are_aligned_distinct_and_zeroed(void) {
    static const size_t sizes[] = {0,     1,     15,     16,     17,        4096,          16384,
                                   16385, 65472, 65473,  131008, (1 << 20), (4 << 20) - 64, 4 << 20,
                                   9 << 20};
    enum { N = sizeof sizes / sizeof *sizes };
    for (int round = 0; round < 3; round++) {
        arena_tick *t = arena_begin("sizes");
        char *blocks[N];
        size_t sum = 0;
        for (int i = 0; i < N; i++) {
            blocks[i] = arena_zalloc(t, sizes[i]);
            CHECK(blocks[i] && (uintptr_t)blocks[i] % 16 == 0);
            for (size_t j = 0; j < sizes[i]; j++) CHECK(blocks[i][j] == 0);
            memset(blocks[i], i + 1, sizes[i]);
            sum += sizes[i];
        }
        for (int i = 0; i < N; i++)
            for (size_t j = 0; j < sizes[i]; j++) CHECK(blocks[i][j] == i + 1);
        CHECK(arena_used(t) == sum && stats().scratch == sum);
        CHECK(arena_end(t) == ARENA_OK);
        CHECK(stats().scratch == 0 && stats().chunks == 0);
    }
}

static void test_no_block_reaches_past_its_chunk(void) {
    for (size_t rest = 0; rest <= 64; rest += 16)
        for (size_t size = 1; size <= 128; size++) {
            arena_tick *t = arena_begin("the end of a chunk");
            CHECK(arena_alloc(t, 1));
            for (size_t left; (left = (size_t)(t->end - t->pos)) > rest;)
                CHECK(arena_alloc(t, left - rest < 8192 ? left - rest : 8192));
            arena__chunk *chunk;
            char *p = arena__alloc_in(t, size, &chunk);
            CHECK(p && p + size <= (char *)chunk + chunk->size);
            arena_end(t);
        }
}

static void test_no_size_is_rounded_past_zero(void) {
    for (size_t less = 0; less < 33; less++) {
        arena_tick *t = arena_begin("nothing used yet");
        CHECK(!arena_alloc(t, huge - less) && arena_error() == ARENA_E_NOMEM);
        CHECK(!arena_alloc_persist(huge - less) && arena_error() == ARENA_E_NOMEM);
        CHECK(arena_used(t) == 0);
        arena_end(t);
    }
}

static void test_nesting_ends_the_inner_ticks_first(void) {
    arena_tick *a = arena_begin("a"), *b = arena_begin("b"), *c = arena_begin(NULL);
    CHECK(arena_current() == c && strcmp(arena_name(a), "a") == 0 && *arena_name(c) == '\0');
    CHECK(arena_number(c) == arena_number(a) + 2);
    CHECK(arena_end(a) == ARENA_OK && arena_current() == NULL);
    CHECK(arena_end(b) == ARENA_E_ENDED && arena_end(a) == ARENA_E_ENDED);
    CHECK(arena_end(NULL) == ARENA_E_ENDED && arena_error() == ARENA_E_ENDED);
    CHECK(arena_alloc(b, 1) == NULL && arena_error() == ARENA_E_ENDED);
    CHECK(arena_strbuf_new(b, 0) == NULL && arena_error() == ARENA_E_ENDED);
}

static int order[4], ran;
static void note(void *arg) {
    order[ran++] = (int)(intptr_t)arg;
}
static void misuse(void *arg) {
    arena_tick *t = arg;
    CHECK(arena_end(t) == ARENA_E_ENDING);
    CHECK(arena_alloc(t, 1) == NULL && arena_error() == ARENA_E_ENDING);
    CHECK(arena_alloc(t, 0) == NULL && arena_error() == ARENA_E_ENDING);
    CHECK(arena_cleanup(t, note, NULL) == ARENA_E_ENDING);
    CHECK(arena_strbuf_new(t, 0) == NULL && arena_error() == ARENA_E_ENDING);
    CHECK(arena_limit(t, 5) == ARENA_E_ENDING);
    arena_tick *own = arena_begin("own"); /* left open: ends with its surroundings */
    CHECK(arena_strdup(own, "fine") != NULL);
    ran++;
}

static void test_cleanups_run_last_in_first_out_and_cannot_touch_their_tick(void) {
    ran = 0;
    arena_tick *t = arena_begin("cleanups");
    CHECK(arena_cleanup(t, note, (void *)1) == ARENA_OK);
    CHECK(arena_cleanup(t, note, (void *)2) == ARENA_OK);
    CHECK(arena_cleanup(NULL, note, (void *)3) == ARENA_OK);
    CHECK(arena_cleanup(t, NULL, NULL) == ARENA_E_INVALID);
    CHECK(arena_used(t) == 0);
    CHECK(arena_end(t) == ARENA_OK);
    CHECK(ran == 3 && order[0] == 3 && order[1] == 2 && order[2] == 1);
    t = arena_begin("misuse");
    ran = 0;
    CHECK(arena_cleanup(t, misuse, t) == ARENA_OK);
    CHECK(arena_end(t) == ARENA_OK && ran == 1);
    CHECK(arena_current() == NULL && stats().ticks_open == 0);
    CHECK(arena_cleanup(NULL, note, NULL) == ARENA_E_ENDED);
}

static char *outer_text;
static void reads_outer(void *arg) {
    (void)arg;
    order[ran++] = outer_text[5 << 20];
}
static void leaves_open(void *arg) {
    (void)arg;
    arena_tick *own = arena_begin("left open, with a cleanup of its own");
    CHECK(arena_cleanup(own, reads_outer, NULL) == ARENA_OK);
}

static void test_what_cleanups_leave_open_ends_before_their_ticks_memory_goes(void) {
    ran = 0;
    arena_tick *t = arena_begin("outer");
    outer_text = arena_alloc(t, 6 << 20); /* of its own mapping: it would be gone */
    memset(outer_text, 'x', 6 << 20);
    CHECK(arena_cleanup(t, note, (void *)2) == ARENA_OK);
    CHECK(arena_cleanup(t, leaves_open, NULL) == ARENA_OK);
    CHECK(arena_end(t) == ARENA_OK);
    CHECK(ran == 2 && order[0] == 2 && order[1] == 'x' && stats().ticks_open == 0);
}

static void test_limits_are_exact(void) {
    arena_tick *t = arena_begin("limit");
    CHECK(arena_limit(t, 100) == ARENA_OK);
    CHECK(arena_alloc(t, 99) && !arena_alloc(t, 2) && arena_error() == ARENA_E_LIMIT);
    arena_strbuf *buf = arena_strbuf_new(t, 0);
    CHECK(arena_strbuf_puts(buf, "ab") == ARENA_E_LIMIT && arena_strbuf_len(buf) == 0);
    CHECK(arena_strbuf_puts(buf, "a") == ARENA_OK && arena_strbuf_puts(buf, "b") == ARENA_E_LIMIT);
    CHECK(strcmp(arena_strbuf_data(buf), "a") == 0);
    CHECK(arena_limit(t, 99) == ARENA_E_INVALID && arena_limit(t, 101) == ARENA_OK);
    CHECK(arena_strbuf_puts(buf, "b") == ARENA_OK && arena_alloc(t, 1) == NULL);
    CHECK(arena_strbuf_clear(buf) == ARENA_OK && arena_used(t) == 99);
    CHECK(arena_limit(t, SIZE_MAX) == ARENA_OK && arena_alloc(t, 1 << 20));
    CHECK(arena_alloc(t, huge) == NULL && arena_error() == ARENA_E_NOMEM);
    CHECK(arena_alloc(t, huge / 2) == NULL && arena_alloc(t, huge - 15) == NULL);
    arena_end(t);
}

static void test_strings_grow_in_place_or_move_and_take_parts_of_themselves(void) {
    arena_tick *t = arena_begin("strings");
    arena_strbuf *buf = arena_strbuf_new(t, 10), *other = arena_strbuf_new(t, 0);
    CHECK(*arena_strbuf_data(other) == '\0');
    for (int i = 0; i < 20000; i++) {
        CHECK(arena_strbuf_printf(buf, "%d,", i) == ARENA_OK);
        if (i % 500 == 0) CHECK(arena_strbuf_append(other, "x", 1) == ARENA_OK);
    }
    const char *at = arena_strbuf_data(buf);
    for (int i = 0; i < 20000; i++) {
        char *end;
        CHECK(strtol(at, &end, 10) == i && *end == ',');
        at = end + 1;
    }
    CHECK(*at == '\0' && arena_strbuf_len(other) == 40);
    CHECK(arena_strbuf_truncate(buf, 3) == ARENA_OK && strcmp(arena_strbuf_data(buf), "0,1") == 0);
    CHECK(arena_strbuf_truncate(buf, 4) == ARENA_E_INVALID);
    for (size_t n = 3; n < 20000000; n *= 2) { /* through every class and into oversize */
        CHECK(arena_strbuf_append(buf, arena_strbuf_data(buf), n) == ARENA_OK);
        CHECK(memcmp(arena_strbuf_data(buf), arena_strbuf_data(buf) + n, n) == 0);
        CHECK(arena_strbuf_data(buf)[2 * n] == '\0');
    }
    CHECK(arena_used(t) == arena_strbuf_len(buf) + 40);
    CHECK(stats().chunks < 3 * arena_strbuf_len(buf)); /* what it outgrew went back */
    arena_end(t);
}

static void test_a_copy_takes_every_byte_and_no_other(void) {
    for (size_t size = 0; size < 200; size++) {
        char from[200], to[202];
        for (size_t i = 0; i < sizeof from; i++) from[i] = (char)(i + 1);
        memset(to, '?', sizeof to);
        arena__copy(to + 1, from, size);
        CHECK(memcmp(to + 1, from, size) == 0 && to[0] == '?' && to[size + 1] == '?');
    }
}

static void test_an_append_that_is_larger_than_the_capacity_moves_the_string(void) {
    char text[300];
    memset(text, 't', sizeof text);
    for (size_t over = 0; over < 4; over++) {
        arena_tick *t = arena_begin("capacity");
        arena_strbuf *s = arena_strbuf_new(t, 0);
        CHECK(arena_strbuf_append(s, text, 1) == ARENA_OK);
        char *behind = arena_memdup(t, "behind", 7);
        CHECK(arena_strbuf_append(s, text, s->cap - s->len + over) == ARENA_OK);
        CHECK(s->len <= s->cap && !strcmp(behind, "behind") && strlen(arena_strbuf_data(s)) == s->len);
        arena_end(t);
    }
}

static void test_the_spare_room_of_a_string_counts_as_written(void) {
    arena_trim(0);
    for (int wipe = 0; wipe < 2; wipe++) {
        arena_tick *t = arena_begin("fills a chunk of its own");
        if (wipe) arena_wipe(t);
        arena_strbuf *s = arena_strbuf_new(t, 0);
        CHECK(arena_alloc(t, 50000)); /* it does not fit beside this */
        static char text[20000];
        CHECK(arena_strbuf_append(s, text, sizeof text) == ARENA_OK);
        while (s->len < s->cap) CHECK(arena_strbuf_append(s, "x", 1) == ARENA_OK);
        CHECK(s->cap > 60000);
        arena_end(t);
        t = arena_begin("gets it next");
        const char *p = arena_zalloc(t, 60000);
        for (int i = 0; i < 60000; i++) CHECK(p[i] == 0);
        arena_end(t);
    }
}

static void test_realloc_keeps_the_content(void) {
    arena_tick *t = arena_begin("realloc");
    unsigned char *p = arena_realloc(t, NULL, 0, 1);
    *p = 42;
    size_t size = 1;
    for (int i = 0; i < 24; i++) {
        if (i % 3 == 0) arena_alloc(t, 8); /* in the way, sometimes */
        p = arena_realloc(t, p, size, size * 2);
        CHECK(p && p[0] == 42);
        for (size_t j = 1; j < size; j++) CHECK(p[j] == (unsigned char)j);
        for (size_t j = size; j < size * 2; j++) p[j] = (unsigned char)j;
        size *= 2;
    }
    CHECK(arena_realloc(t, p, size, 5) == p && arena_used(t) == 5 + 8 * 8);
    void *odd = arena_alloc(t, 5001), *behind = arena_alloc(t, 8);
    CHECK(behind && arena_realloc(t, odd, 5001, 5008) == odd); /* within its 16 bytes */
    CHECK(arena_realloc(t, odd, 5008, 5009) != odd);
    CHECK(arena_realloc(t, p, 5, huge) == NULL && p[0] == 42);
    arena_end(t);
}

static void test_strays_live_on_and_are_counted(void) {
    arena_stats before = stats();
    char *a = arena_strdup(NULL, "stray"), *b = arena_printf(NULL, "%d", 5);
    arena_strbuf *c = arena_strbuf_new(NULL, 4);
    CHECK(arena_strbuf_puts(c, "a long enough stray to grow") == ARENA_OK);
    char *d = arena_realloc(NULL, a, 6, 100), *e = arena_zalloc(NULL, 10);
    CHECK(strcmp(d, "stray") == 0 && strcmp(b, "5") == 0 && e[9] == 0);
    CHECK(stats().strays_count == before.strays_count + 6); /* a string is two */
    CHECK(stats().persisted_count == before.persisted_count);
    arena_free_persist(a), arena_free_persist(b), arena_free_persist(c), arena_free_persist(d);
    arena_free_persist(e), arena_free_persist(NULL);
    CHECK(stats().strays == before.strays && stats().strays_count == before.strays_count);
}

static void test_persisted_memory_outlives_ticks(void) {
    arena_stats before = stats();
    arena_tick *t = arena_begin("t");
    char *a = arena_strdup_persist("kept"), *b = arena_strndup_persist("kept", 2);
    char *c = arena_printf_persist("%s!", a), *d = arena_memdup_persist("x\0y", 3);
    char *e = arena_zalloc_persist(100);
    arena_strbuf *f = arena_strbuf_new_persist(0);
    for (int i = 0; i < 1000; i++) CHECK(arena_strbuf_puts(f, "grow ") == ARENA_OK);
    e = arena_realloc_persist(e, 200);
    CHECK(arena_size_persist(e) == 200 && arena_size_persist(NULL) == 0);
    arena_end(t);
    CHECK(!strcmp(a, "kept") && !strcmp(b, "ke") && !strcmp(c, "kept!") && d[2] == 'y' && !e[99]);
    CHECK(arena_strbuf_len(f) == 5000);
    CHECK(arena_alloc_persist(huge) == NULL && arena_error() == ARENA_E_NOMEM);
    arena_free_persist(a), arena_free_persist(b), arena_free_persist(c), arena_free_persist(d);
    arena_free_persist(e), arena_free_persist(f);
    CHECK(stats().persisted == before.persisted && stats().persisted_count == before.persisted_count);
}

static void test_a_spike_is_given_back_within_32_ticks_and_a_steady_loop_makes_no_mapping(void) {
    arena_trim(0);
    CHECK(stats().cached == 0);
    arena_tick *t = arena_begin("spike");
    for (int i = 0; i < 1000; i++) arena_alloc(t, 64 << 10);
    arena_end(t);
    CHECK(stats().cached > 60 << 20);
    for (int i = 0; i < 32; i++) {
        t = arena_begin("steady");
        for (int j = 0; j < 117; j++) arena_alloc(t, 1000);
        arena_end(t);
    }
    CHECK(stats().cached <= 3 * (64 << 10));
    arena_stats before = stats();
    for (int i = 0; i < 1000; i++) {
        t = arena_begin("steady");
        for (int j = 0; j < 117; j++) arena_alloc(t, 1000);
        arena_end(t);
    }
    CHECK(stats().maps == before.maps && stats().unmaps == before.unmaps);
    CHECK(arena_trim(SIZE_MAX) == 0);
    CHECK(arena_trim(64 << 10) > 0 && stats().cached == 64 << 10);
    t = arena_begin("spike");
    for (int i = 0; i < 1000; i++) arena_alloc(t, 64 << 10);
    arena_end(t);
    for (int i = 0; i < 32; i++) arena_end(arena_begin("empty ticks count too"));
    CHECK(stats().cached == 0);
    t = arena_begin("small");
    arena_alloc(t, 1);
    arena_end(t);
    t = arena_begin("oversize");
    arena_alloc(t, 50 << 20);
    arena_end(t);
    CHECK(stats().cached == 64 << 10); /* oversize has a mapping of its own, and is not kept */
}

static void test_many_requests_of_one_size_share_chunks(void) {
    static const size_t sizes[] = {1000, 17000, 20000, 100000, 900000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        arena_trim(0);
        uint64_t maps = stats().maps;
        arena_tick *t = arena_begin("many");
        for (int k = 0; k < 400; k++) CHECK(arena_alloc(t, sizes[i]));
        CHECK(stats().maps - maps < 150); /* and not 400 */
        CHECK(stats().chunks < sizes[i] * 400 * 3 / 2 + (4 << 20));
        arena_end(t);
    }
}

static void test_pins_hold_the_chunk_past_its_tick(void) {
    arena_stats before = stats();
    arena_tick *t = arena_begin("pins");
    arena__chunk *chunk;
    char *p = arena__alloc_in(t, 100, &chunk);
    strcpy(p, "pinned");
    arena__pin(chunk), arena__pin(chunk);
    arena_end(t);
    CHECK(stats().pinned_count == before.pinned_count + 1 && stats().pinned >= 64 << 10);
    t = arena_begin("others");
    for (int i = 0; i < 100; i++) memset(arena_alloc(t, 5000), 'x', 5000);
    arena_end(t);
    CHECK(strcmp(p, "pinned") == 0);
    arena__unpin(chunk);
    CHECK(stats().pinned_count == before.pinned_count + 1 && strcmp(p, "pinned") == 0);
    arena__unpin(chunk);
    CHECK(stats().pinned_count == before.pinned_count && stats().pinned == before.pinned);
}

/* An operating system that gives no memory after `left` mappings. */
static int left;
static void *(*real_map)(size_t);
static void *(*real_remap)(void *, size_t, size_t);
static void *failing_map(size_t size) {
    return left-- > 0 ? real_map(size) : NULL;
}
static void *failing_remap(void *p, size_t old, size_t size) {
    return left-- > 0 ? real_remap(p, old, size) : NULL;
}

static void *small_map(size_t size) {
    return size > ARENA__CHUNK_MIN ? NULL : real_map(size);
}

static void test_a_tick_goes_on_with_small_chunks_where_its_growth_cannot_be_had(void) {
    real_map = arena__system.map;
    arena_trim(0);
    arena__system.map = small_map;
    arena_tick *t = arena_begin("small chunks");
    for (int i = 0; i < 1000; i++) CHECK(arena_alloc(t, 1000));
    CHECK(!arena_alloc(t, 100000) && arena_error() == ARENA_E_NOMEM);
    arena_end(t);
    arena__system.map = real_map;
}

static void test_no_memory_at_any_mapping_leaves_all_as_it_was(void) {
    real_map = arena__system.map;
    real_remap = arena__system.remap;
    int failures = 0;
    for (int n = 0; n < 30; n++) {
        arena_trim(0);
        arena__system.map = failing_map;
        arena__system.remap = failing_remap;
        left = n;
        arena_tick *t = arena_begin("failing");
        CHECK(t);
        arena_strbuf *buf = arena_strbuf_new(t, 0);
        size_t length = 0, used = 0;
        char piece[3000];
        memset(piece, 'p', sizeof piece);
        for (int i = 0; i < 120; i++) {
            size_t size = (size_t)i * 250 + (i == 60 ? 6 << 20 : 0);
            char *p = arena_alloc(t, size);
            if (p) {
                memset(p, 'a', size);
                used += size;
            } else {
                failures++;
                CHECK(arena_error() == ARENA_E_NOMEM);
            }
            for (int k = 0; buf && k < 5; k++) {
                int code = arena_strbuf_append(buf, piece, sizeof piece);
                CHECK(code == ARENA_OK || code == ARENA_E_NOMEM);
                if (code == ARENA_OK)
                    length += sizeof piece;
                else
                    failures++;
            }
            CHECK(arena_used(t) == used + length);
            CHECK(!buf || arena_strbuf_len(buf) == length);
        }
        if (buf)
            for (size_t i = 0; i < length; i++) CHECK(arena_strbuf_data(buf)[i] == 'p');
        arena__system.map = real_map;
        arena__system.remap = real_remap;
        CHECK(arena_alloc(t, 1 << 20)); /* memory is back: the tick goes on */
        CHECK(arena_end(t) == ARENA_OK);
        CHECK(stats().scratch == 0 && stats().chunks == 0);
    }
    CHECK(failures > 200);
}

static void *(*real_resize)(void *, size_t);
static void *failing_resize(void *old, size_t size) {
    return left-- > 0 ? real_resize(old, size) : NULL;
}
static bool (*real_seal)(void *, size_t);
static bool failing_seal(void *start, size_t size) {
    return left-- > 0 && real_seal(start, size);
}

/* Everything that allocates, once. Returns whether something failed. */
static bool all_calls(void) {
    arena_stats before = stats();
    size_t used = 0, kept = 0, strays = 0;
    bool failed = false;
#define TRY(call, then)                                                                           \
    do {                                                                                          \
        if ((call)) {                                                                             \
            then;                                                                                 \
        } else {                                                                                  \
            failed = true;                                                                        \
            CHECK(arena_error() == ARENA_E_NOMEM);                                                \
        }                                                                                         \
    } while (0)
    char *p[6] = {0}, *q = NULL, *stray = NULL;
    arena_strbuf *persisted = NULL, *text = NULL;
    TRY(p[0] = arena_strdup_persist("kept"), kept += 5);
    TRY(p[1] = arena_zalloc_persist(100), kept += 100);
    TRY(p[2] = arena_printf_persist("%d", 12345), kept += 6);
    TRY(persisted = arena_strbuf_new_persist(10), kept += sizeof *persisted + 11);
    if (persisted)
        for (int i = 0; i < 60; i++) {
            size_t length = arena_strbuf_len(persisted);
            TRY(arena_strbuf_puts(persisted, "0123456789") == ARENA_OK, length += 10);
            CHECK(arena_strbuf_len(persisted) == length);
        }
    if (p[0]) TRY(q = arena_realloc_persist(p[0], 5000), (p[0] = q, kept += 4995));
    if (p[0]) CHECK(!strcmp(p[0], "kept") && arena_size_persist(p[0]) == (q ? 5000 : 5));
    TRY(stray = arena_strdup(NULL, "stray"), strays += 6);
    arena_tick *t;
    TRY(t = arena_begin("all"), (void)0);
    if (t) {
        TRY(arena_alloc(t, 1), used += 1);
        TRY(arena_zalloc(t, 200000), used += 200000);
        TRY(arena_alloc(t, 5 << 20), used += 5 << 20);
        TRY(text = arena_strbuf_new(t, 100), (void)0);
        for (int i = 0; text && i < 8; i++) {
            char piece[40000];
            memset(piece, 't', sizeof piece);
            TRY(arena_strbuf_append(text, piece, sizeof piece) == ARENA_OK, used += sizeof piece);
            for (size_t k = 0; k < arena_strbuf_len(text); k++)
                CHECK(arena_strbuf_data(text)[k] == 't');
        }
        q = NULL;
        TRY(q = arena_alloc(t, 10), used += 10);
        if (q) TRY(q = arena_realloc(t, q, 10, 70000), used += 69990);
        TRY(arena_cleanup(t, note, NULL) == ARENA_OK, (void)0);
        CHECK(arena_used(t) == used && stats().scratch - before.scratch == used);
    }
    arena_stats now = stats();
    if (persisted) { /* what a string holds is its capacity */
        CHECK(now.persisted - before.persisted >= kept - 11);
    } else {
        CHECK(now.persisted - before.persisted == kept);
    }
    CHECK(now.strays - before.strays == strays);
    ran = 0;
    if (t) CHECK(arena_end(t) == ARENA_OK);
    for (int i = 0; i < 6; i++) arena_free_persist(p[i]);
    arena_free_persist(persisted), arena_free_persist(stray);
    now = stats();
    CHECK(now.scratch == before.scratch && now.chunks == before.chunks);
    CHECK(now.persisted == before.persisted && now.persisted_count == before.persisted_count);
    CHECK(now.strays == before.strays && now.strays_count == before.strays_count);
    CHECK(now.ticks_open == before.ticks_open);
    return failed;
}

/* The n-th call of the system fails, and only that one: for every n there is. */
static int countdown;
static bool fails_now(void) {
    return countdown-- == 0;
}
static void *nth_map(size_t size) {
    return fails_now() ? NULL : real_map(size);
}
static void *nth_remap(void *start, size_t old_size, size_t size) {
    return fails_now() ? NULL : real_remap(start, old_size, size);
}
static void *nth_resize(void *old, size_t size) {
    return fails_now() ? NULL : real_resize(old, size);
}
static bool nth_seal(void *start, size_t size) {
    return !fails_now() && real_seal(start, size);
}

static void test_each_call_of_the_system_may_fail_in_turn(void) {
    arena__os real = arena__system;
    real_map = real.map, real_remap = real.remap, real_resize = real.resize, real_seal = real.seal;
    for (int dial = 0; dial < 2; dial++) {
        CHECK(arena_debug(dial ? ARENA_DEBUG_GUARD : 0) >= 0);
        int n = 0, failures = 0;
        for (bool reached = true; reached; n++) {
            arena_trim(0);
            countdown = n;
            arena__system.map = nth_map, arena__system.remap = nth_remap;
            arena__system.resize = nth_resize, arena__system.seal = nth_seal;
            failures += all_calls();
            arena__system = real;
            reached = countdown < 0;
        }
        CHECK(n > 15 && failures > 8); /* not all: a remap that is refused is a copy */
        for (int after = 0; after < n; after++) { /* and from the n-th on, all of them */
            arena_trim(0);
            left = after;
            arena__system.map = failing_map, arena__system.remap = failing_remap;
            arena__system.resize = failing_resize, arena__system.seal = failing_seal;
            (void)all_calls();
            arena__system = real;
        }
    }
    CHECK(arena_debug(0) == ARENA_DEBUG_GUARD && !all_calls());
}

static void *other_thread(void *arg) {
    CHECK(arena_end(arg) == ARENA_E_THREAD);
    CHECK(arena_current() == NULL);
    arena_begin("left open by a thread that ends");
    arena_begin("the same, without memory");
    arena_begin("with a cleanup");
    CHECK(arena_cleanup(NULL, note, (void *)9) == ARENA_OK);
    CHECK(arena_alloc(NULL, 100000));
    return NULL;
}

static void *busy_thread(void *arg) {
    for (int i = 0; i < 2000; i++) {
        arena_tick *t = arena_begin("busy");
        char *p = arena_alloc(t, (size_t)(i % 7) * 9000 + 1);
        p[0] = *(char *)arg;
        char *kept = arena_strdup_persist("kept");
        (void)stats();
        CHECK(p[0] == *(char *)arg && arena_end(t) == ARENA_OK);
        arena_free_persist(kept);
    }
    return NULL;
}

static void test_threads_have_their_own_ticks_and_an_end_of_a_thread_ends_them(void) {
    arena_tick *t = arena_begin("main");
    pthread_t thread, many[8];
    ran = 0;
    CHECK(pthread_create(&thread, NULL, other_thread, t) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(arena_current() == t && stats().ticks_open == 1 && stats().scratch == 0);
    CHECK(ran == 1 && order[0] == 9);
    char names[8] = "abcdefg";
    for (int i = 0; i < 8; i++) CHECK(!pthread_create(&many[i], NULL, busy_thread, &names[i]));
    for (int i = 0; i < 8; i++) CHECK(!pthread_join(many[i], NULL));
    arena_end(t);
    CHECK(stats().ticks_open == 0 && stats().chunks == 0);
}

static void *forks(void *arg) {
    (void)arg;
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            arena_tick *t = arena_begin("child");
            _exit(t && arena_alloc(t, 100000) && arena_end(t) == ARENA_OK ? 0 : 1);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    return NULL;
}

static void test_a_fork_while_another_thread_allocates_never_hangs_the_child(void) {
    pthread_t busy, forker;
    char name = 'f';
    CHECK(!pthread_create(&busy, NULL, busy_thread, &name));
    CHECK(!pthread_create(&forker, NULL, forks, NULL));
    CHECK(!pthread_join(forker, NULL) && !pthread_join(busy, NULL));
}

static void test_text_that_cannot_be_printed_is_a_code(void) {
    static const wchar_t wrong[] = {0x110000, 0}; /* no character, and no bytes in the C locale */
    arena_tick *t = arena_begin("t");
    arena_strbuf *s = arena_strbuf_new(t, 0);
    CHECK(!arena_printf(t, "%ls", wrong) && arena_error() == ARENA_E_INVALID);
    CHECK(!arena_printf_persist("%ls", wrong) && arena_error() == ARENA_E_INVALID);
    CHECK(arena_strbuf_printf(s, "%ls", wrong) == ARENA_E_INVALID && arena_strbuf_len(s) == 0);
    CHECK(arena_used(t) == 0);
    arena_end(t);
}

static void test_a_lone_string_in_the_newest_chunk_may_move(void) {
    arena_tick *t = arena_begin("t");
    arena_strbuf *old = arena_strbuf_new(t, 0), *s;
    CHECK(arena_alloc(t, 60000) && arena_strbuf_puts(old, "old") == ARENA_OK);
    s = arena_strbuf_new(t, 40000); /* a chunk of its own, before the first one in the list */
    for (int i = 0; i < 200; i++) CHECK(arena_strbuf_append(s, "0123456789", 10) == ARENA_OK);
    CHECK(arena_strbuf_append(s, arena_strbuf_data(s), 2000) == ARENA_OK);
    for (int i = 0; i < 9; i++)
        CHECK(!arena_strbuf_append(s, arena_strbuf_data(s), arena_strbuf_len(s)));
    for (size_t i = 0; i < arena_strbuf_len(s); i++)
        CHECK(arena_strbuf_data(s)[i] == (char)('0' + i % 10));
    CHECK(arena_strbuf_len(s) == 4000 << 9 && stats().chunks < 8 << 20);
    arena_end(t);
    CHECK(arena_realloc(t, s, 100, 50) == NULL && arena_error() == ARENA_E_ENDED);
    CHECK(arena_strbuf_new(t, 5) == NULL && arena_error() == ARENA_E_ENDED);
    void *p = arena_realloc_persist(NULL, 10), *q = arena_memdup_persist(NULL, 0);
    CHECK(p && q && arena_size_persist(p) == 10 && arena_size_persist(q) == 0);
    arena_free_persist(p), arena_free_persist(q);
}

static void test_bad_arguments_are_codes(void) {
    CHECK(arena_limit(NULL, 5) == ARENA_E_ENDED);
    CHECK(arena_number(NULL) == 0 && arena_used(NULL) == 0 && *arena_name(NULL) == '\0');
    CHECK(strcmp(arena_strerror(ARENA_E_LIMIT), arena_strerror(ARENA_OK)) != 0);
    CHECK(strcmp(arena_version(), ARENA_VERSION) == 0);
    arena_stats_get(NULL);
    arena_tick *t = arena_begin("a name that is longer than the record has room for it");
    CHECK(strlen(arena_name(t)) == 31);
    char *s = arena_strndup(t, "abcdef", 3);
    CHECK(strcmp(s, "abc") == 0 && strcmp(arena_strndup(t, "ab", 9), "ab") == 0);
    CHECK(strcmp(arena_printf(t, "%s-%d", s, 7), "abc-7") == 0);
    CHECK(memcmp(arena_memdup(t, "x\0y", 3), "x\0y", 3) == 0 && arena_memdup(t, NULL, 0));
    arena_end(t);
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0); /* a forked child has nothing to print again */
    RUN(test_allocations_are_aligned_distinct_and_zeroed);
    RUN(test_no_block_reaches_past_its_chunk);
    RUN(test_no_size_is_rounded_past_zero);
    RUN(test_nesting_ends_the_inner_ticks_first);
    RUN(test_cleanups_run_last_in_first_out_and_cannot_touch_their_tick);
    RUN(test_what_cleanups_leave_open_ends_before_their_ticks_memory_goes);
    RUN(test_limits_are_exact);
    RUN(test_strings_grow_in_place_or_move_and_take_parts_of_themselves);
    RUN(test_a_copy_takes_every_byte_and_no_other);
    RUN(test_an_append_that_is_larger_than_the_capacity_moves_the_string);
    RUN(test_the_spare_room_of_a_string_counts_as_written);
    RUN(test_realloc_keeps_the_content);
    RUN(test_strays_live_on_and_are_counted);
    RUN(test_persisted_memory_outlives_ticks);
    RUN(test_a_spike_is_given_back_within_32_ticks_and_a_steady_loop_makes_no_mapping);
    RUN(test_many_requests_of_one_size_share_chunks);
    RUN(test_pins_hold_the_chunk_past_its_tick);
    RUN(test_a_tick_goes_on_with_small_chunks_where_its_growth_cannot_be_had);
    RUN(test_no_memory_at_any_mapping_leaves_all_as_it_was);
    RUN(test_each_call_of_the_system_may_fail_in_turn);
    RUN(test_threads_have_their_own_ticks_and_an_end_of_a_thread_ends_them);
    RUN(test_a_fork_while_another_thread_allocates_never_hangs_the_child);
    RUN(test_text_that_cannot_be_printed_is_a_code);
    RUN(test_a_lone_string_in_the_newest_chunk_may_move);
    RUN(test_bad_arguments_are_codes);
    return 0;
}
