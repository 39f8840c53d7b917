/* test_retention.c: what each policy keeps of ended ticks, for the process and for a name. */
#include "check.h"

#define SIZE ((size_t)300 << 10) /* of a piece: chunks of 512 KiB at the most */

static void ticks(const char *name, int count, size_t size) {
    while (count--) {
        arena_tick *t = arena_begin(name);
        CHECK(t && arena_alloc(t, size));
        CHECK(arena_end(t) == ARENA_OK);
    }
}

static arena_retained row(const char *name) {
    arena_retained rows[16];
    size_t count = arena_retention(rows, 16);
    CHECK(count >= 1 && count <= 16 && rows[0].name[0] == '\0');
    for (size_t i = 0; i < count; i++)
        if (strcmp(rows[i].name, name) == 0) return rows[i];
    return (arena_retained){.policy = -1};
}

static void set(const char *name, int policy, size_t bytes) {
    CHECK(arena_retain(name, policy, bytes) == ARENA_OK);
}

static void reset(void) {
    set(NULL, ARENA_RETAIN_ADAPTIVE, 0);
    ticks("", 40, 1);
    arena_trim(0);
    CHECK(stats().cached == 0);
}

static void all_is_never_forgotten_but_a_trim_takes_it(void) {
    set(NULL, ARENA_RETAIN_ALL, 0);
    ticks("", 1, SIZE);
    size_t cached = stats().cached;
    CHECK(cached >= SIZE);
    ticks("", 100, 1);
    CHECK(stats().cached >= cached);
    arena_trimmed out;
    CHECK(arena_trim_all(ARENA_TRIM_KEEP_RETAINED, UINT64_MAX, 0, &out) == ARENA_OK && out.chunks == 0);
    CHECK(arena_trim(0) >= cached && stats().cached == 0);
    reset();
}

static void none_keeps_nothing(void) {
    ticks("", 1, SIZE);
    CHECK(stats().cached > 0);
    set("", ARENA_RETAIN_NONE, 0); /* what is there goes at once */
    CHECK(stats().cached == 0);
    uint64_t maps = stats().maps, unmaps = stats().unmaps;
    ticks("", 5, SIZE);
    CHECK(stats().cached == 0 && stats().maps == maps + 5 && stats().unmaps == unmaps + 5);
    reset();
}

static void bytes_are_kept_and_not_one_chunk_more(void) {
    size_t most = 2 * ARENA__CHUNK_MIN;
    set(NULL, ARENA_RETAIN_BYTES, most);
    arena_tick *t[3];
    for (int i = 0; i < 3; i++) {
        t[i] = arena_begin(NULL);
        CHECK(arena_alloc(t[i], 1));
    }
    for (int i = 2; i >= 0; i--) CHECK(arena_end(t[i]) == ARENA_OK);
    CHECK(stats().cached == most);
    ticks("", 1, SIZE); /* its chunk is over what may be kept */
    CHECK(stats().cached == most);
    for (int i = 0; i < 40; i++) CHECK(arena_end(arena_begin(NULL)) == ARENA_OK);
    CHECK(stats().cached == most && row("").most == most && row("").policy == ARENA_RETAIN_BYTES);
    set(NULL, ARENA_RETAIN_BYTES, most - 1);
    CHECK(stats().cached == ARENA__CHUNK_MIN);
    reset();
}

static void a_name_has_a_cache_of_its_own(void) {
    set("kept", ARENA_RETAIN_ALL, 0);
    ticks("kept", 1, SIZE);
    size_t kept = row("kept").cached;
    CHECK(kept >= SIZE && row("").cached == 0 && stats().cached == kept);
    uint64_t maps = stats().maps;
    ticks("other", 1, SIZE); /* takes nothing of it */
    CHECK(stats().maps == maps + 1 && row("").cached >= SIZE && row("kept").cached == kept);
    ticks("kept", 3, SIZE);
    CHECK(stats().maps == maps + 1 && row("kept").needed >= SIZE);
    ticks("other", 40, 1);
    CHECK(row("kept").cached == kept);
    set("kept", ARENA_RETAIN_NONE, 0);
    CHECK(row("kept").cached == 0);
    ticks("kept", 1, SIZE);
    CHECK(row("kept").cached == 0);
    set("kept", ARENA_RETAIN_AS_PROCESS, 0);
    CHECK(row("kept").policy == -1);
    ticks("kept", 1, SIZE);
    CHECK(row("").cached >= SIZE);
    reset();
}

static void a_spike_of_a_name_is_forgotten_though_it_never_comes_again(void) {
    set("rare", ARENA_RETAIN_ADAPTIVE, 0);
    ticks("rare", 1, SIZE);
    CHECK(row("rare").cached >= SIZE);
    for (int i = 0; i < 32; i++) ticks("often", 1, 1);
    CHECK(row("rare").cached == 0);
    set("rare", ARENA_RETAIN_AS_PROCESS, 0);
    reset();
}

static void a_tick_keeps_the_pool_that_it_began_with(void) {
    set("late", ARENA_RETAIN_ALL, 0);
    arena_tick *t = arena_begin("late");
    CHECK(arena_alloc(t, SIZE));
    set("late", ARENA_RETAIN_AS_PROCESS, 0); /* what it returns is the process's now */
    CHECK(arena_end(t) == ARENA_OK);
    CHECK(row("").cached >= SIZE && row("late").policy == -1);
    set("late", ARENA_RETAIN_NONE, 0); /* the name is known: no new pool */
    t = arena_begin("late");
    CHECK(arena_alloc(t, SIZE));
    arena_trim(0);
    CHECK(arena_end(t) == ARENA_OK && stats().cached == 0);
    set("late", ARENA_RETAIN_AS_PROCESS, 0);
    reset();
}

static void what_makes_no_sense_is_refused(void) {
    CHECK(arena_retain(NULL, -1, 0) == ARENA_E_INVALID);
    CHECK(arena_retain(NULL, 5, 0) == ARENA_E_INVALID);
    CHECK(arena_retain("", ARENA_RETAIN_AS_PROCESS, 0) == ARENA_E_INVALID);
    CHECK(arena_retain("never had one", ARENA_RETAIN_AS_PROCESS, 0) == ARENA_OK);
    char name[16];
    int given = 0;
    for (int i = 0; i < 100; i++) { /* names that come and go leave nothing behind */
        (void)snprintf(name, sizeof name, "go%d", i);
        CHECK(arena_retain(name, ARENA_RETAIN_ALL, 0) == ARENA_OK);
        ticks(name, 1, 1);
        CHECK(row(name).cached > 0 && row(name).needed > 0);
        CHECK(arena_retain(name, ARENA_RETAIN_AS_PROCESS, 0) == ARENA_OK);
    }
    CHECK(arena_retain("held", ARENA_RETAIN_ALL, 0) == ARENA_OK);
    arena_tick *t = arena_begin("held");
    CHECK(arena_alloc(t, 1));
    CHECK(arena_retain("held", ARENA_RETAIN_AS_PROCESS, 0) == ARENA_OK);
    for (int i = 0; i < 20; i++) {
        (void)snprintf(name, sizeof name, "n%d", i);
        int code = arena_retain(name, ARENA_RETAIN_ALL, 0);
        CHECK(code == ARENA_OK || code == ARENA_E_LIMIT);
        given += code == ARENA_OK;
    }
    CHECK(given == ARENA__POOLS - 2); /* one pool has memory of an open tick */
    CHECK(arena_end(t) == ARENA_OK);
    CHECK(arena_retain("last", ARENA_RETAIN_ALL, 0) == ARENA_OK);
    given++;
    CHECK(arena_retention(NULL, 0) == (size_t)given + 1);
    CHECK(arena_retain("n1", ARENA_RETAIN_NONE, 0) == ARENA_OK); /* those that have one go on */
}

static void a_long_name_is_told_apart_by_what_is_kept_of_it(void) {
    const char *name = "0123456789012345678901234567890123456789";
    arena_tick *t = arena_begin(name);
    CHECK(strlen(arena_name(t)) == 31);
    CHECK(arena_end(t) == ARENA_OK);
    CHECK(arena_retain(name, ARENA_RETAIN_AS_PROCESS, 0) == ARENA_OK);
}

int main(void) {
    RUN(all_is_never_forgotten_but_a_trim_takes_it);
    RUN(none_keeps_nothing);
    RUN(bytes_are_kept_and_not_one_chunk_more);
    RUN(a_name_has_a_cache_of_its_own);
    RUN(a_spike_of_a_name_is_forgotten_though_it_never_comes_again);
    RUN(a_tick_keeps_the_pool_that_it_began_with);
    RUN(what_makes_no_sense_is_refused);
    RUN(a_long_name_is_told_apart_by_what_is_kept_of_it);
    return 0;
}
