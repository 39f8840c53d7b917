/* test_overhead.c: how much more memory is mapped than was asked for. Results alone do not show when
 * growth, size classes or the cache begin to waste. */
#include "check.h"

/* Bytes mapped for each byte asked for, by `count` requests of `size` bytes. */
static double mapped_for(size_t size, size_t count) {
    arena_tick *t = arena_begin("ratio");
    for (size_t i = 0; i < count; i++) CHECK(arena_alloc(t, size));
    double ratio = (double)stats().chunks / (double)(size * count);
    arena_end(t);
    return ratio;
}

static void test_a_full_tick_maps_little_more_than_was_asked_for(void) {
    /* Up to a quarter of the chunk, at most that is lost at its end; 16 is the alignment. */
    static const struct {
        size_t size, count;
        double most;
    } cases[] = {
        {16, 1000000, 1.6},  {48, 300000, 1.6},    {100, 100000, 1.8},  {1000, 20000, 1.6},
        {5000, 5000, 1.6},   {16000, 2000, 1.7},   {17000, 2000, 1.7},  {40000, 1000, 1.7},
        {70000, 500, 1.9},   {200000, 200, 1.7},   {530000, 60, 2.0},   {1100000, 30, 2.0},
        {4000000, 10, 1.06}, {5000000, 10, 1.002}, {50000000, 2, 1.001}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double ratio = mapped_for(cases[i].size, cases[i].count);
        if (ratio > cases[i].most)
            fprintf(stderr, "%zu x %zu: %.3f\n", cases[i].count, cases[i].size, ratio);
        CHECK(ratio <= cases[i].most);
    }
    CHECK(mapped_for(1, 1) <= 64 << 10); /* one byte: one chunk */
}

/* What has been handed out, the spare room of strings included; a new chunk is mapped long before it is full. */
static size_t written(const arena_tick *t) {
    size_t sum = 0;
    for (const arena__chunk *chunk = t->chunks; chunk; chunk = chunk->next)
        sum += chunk == t->current ? (size_t)(t->pos - (const char *)chunk) : chunk->extent;
    return sum;
}

/* The worst that can be done to it: it never grows in place, and leaves a copy each time. */
static void test_a_string_that_must_move_takes_at_most_six_times_its_length(void) {
    for (size_t piece = 1; piece < 1000000; piece = piece * 7 + 3) {
        arena_tick *t = arena_begin("string");
        arena_strbuf *s = arena_strbuf_new(t, 0);
        char *text = malloc(piece);
        CHECK(text);
        memset(text, 'x', piece);
        while (arena_strbuf_len(s) < 30000000 && arena_strbuf_len(s) / piece < 200000) {
            CHECK(arena_strbuf_append(s, text, piece) == ARENA_OK);
            CHECK(arena_alloc(t, 1)); /* in the way, 16 bytes */
            size_t asked = arena_strbuf_len(s) + 16 * (arena_strbuf_len(s) / piece);
            CHECK(written(t) <= 6 * asked + 4096);
            CHECK(stats().chunks <= 8 * asked + (64 << 10));
        }
        free(text);
        arena_end(t);
    }
}

static void test_mappings_are_few_and_the_bookkeeping_is_small(void) {
    arena_trim(0);
    arena_stats before = stats();
    arena_tick *t = arena_begin("many");
    for (int i = 0; i < 1000000; i++) CHECK(arena_alloc(t, 40));
    CHECK(stats().maps - before.maps <= 20); /* 48 MB: chunks double up to 4 MiB */
    arena_end(t);
    CHECK(sizeof(struct arena_tick) <= 192 && ARENA__HEAD <= 64);
    arena_stats persisted = stats();
    void *p = arena_alloc_persist(1000);
    CHECK(stats().persisted - persisted.persisted == 1000);
    arena_free_persist(p);
}

static void test_what_is_kept_between_ticks_is_what_they_need(void) {
    for (int i = 0; i < 100; i++) {
        arena_tick *t = arena_begin("steady");
        for (int k = 0; k < 117; k++) CHECK(arena_alloc(t, 1000));
        uint64_t chunks = stats().chunks;
        arena_end(t);
        if (i > 32) CHECK(stats().cached == chunks && stats().high_water == chunks);
    }
}

int main(void) {
    RUN(test_a_full_tick_maps_little_more_than_was_asked_for);
    RUN(test_a_string_that_must_move_takes_at_most_six_times_its_length);
    RUN(test_mappings_are_few_and_the_bookkeeping_is_small);
    RUN(test_what_is_kept_between_ticks_is_what_they_need);
    return 0;
}
