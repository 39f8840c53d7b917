/* Where memory comes from, and the map of what escapes: a C program with planted escapes. */
#define ARENA_SITES 1
#include "check.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct found {
    arena_escape row;
    int line;
    const char *wanted;
    size_t rows;
} found;

static void look(const arena_escape *row, void *arg) {
    found *f = arg;
    f->rows++;
    if (strcmp(row->kind, f->wanted) != 0) return;
    if (f->line && (!row->site_depth || row->site[0].line != f->line)) return;
    f->row = *row;
}

/* The row of that kind from that line; count_ever is 0 when there is none. */
static found find(const char *kind, int line) {
    found f = {.line = line, .wanted = kind};
    (void)arena_escapes(look, &f);
    return f;
}

static void test_off_records_nothing(void) {
    char *kept = arena_strdup_persist("x");
    CHECK(arena_tracing() == 0);
    CHECK(arena_escapes(NULL, NULL) == 0);
    arena_free_persist(kept);
}

static void test_a_depth_is_from_0_to_32(void) {
    CHECK(arena_trace(-1) == ARENA_E_INVALID);
    CHECK(arena_trace(33) == ARENA_E_INVALID);
    CHECK(arena_trace(1) == 0);
    CHECK(arena_trace(32) == 1);
    CHECK(arena_trace(1) == 32);
    CHECK(arena_trace_words(NULL) == 0 && arena_trace_words("") == 0 && arena_trace_words("8") == 8);
    CHECK(arena_trace_words("33") < 0 && arena_trace_words("x") < 0 && arena_trace_words("1 ") < 0);
    CHECK(arena_trace_words("-1") < 0 && arena_trace_words("99999999999") < 0);
}

static char *cache[64];

/* Three escapes are planted, each on a line of its own; the rest goes. */
static void test_planted_escapes_are_named_by_file_and_line(void) {
    arena_strbuf *log = NULL;
    int first = 0, second = 0, third = 0;
    for (unsigned turn = 0; turn < 16; turn++) {
        arena_tick *tick = arena_begin("loop");
        char *text = arena_printf(tick, "turn %u", turn);
        cache[turn] = arena_strdup_persist(text), first = __LINE__;
        if (!log) log = arena_strbuf_new_persist(0), second = __LINE__;
        CHECK(arena_strbuf_puts(log, text) == ARENA_OK);
        char *gone = arena_memdup_persist(text, 4);
        arena_free_persist(gone);
        CHECK(arena_end(tick) == ARENA_OK);
        cache[turn + 32] = arena_strdup(NULL, "stray"), third = __LINE__;
    }
    found f = find("persist", first);
    CHECK(f.row.count == 16 && f.row.bytes == 10 * 7 + 6 * 8 && f.row.count_ever == 16);
    CHECK(!strcmp(f.row.tick, "loop") && strstr(f.row.site[0].file, "test_sites.c"));
    CHECK(!strcmp(f.row.site[0].function, "test_planted_escapes_are_named_by_file_and_line"));
    CHECK(f.row.turn == 16 && f.row.last == f.row.first + 15 && f.row.age > 0);
    CHECK(find("persist", second).row.count == 1); /* a string, and its bytes */
    CHECK(find("persist", second).row.bytes == arena_size_persist(log) + arena_size_persist(log->data));
    found stray = find("stray", third);
    CHECK(stray.row.count == 16 && stray.row.bytes == 16 * 6);
    CHECK(stray.row.tick == NULL);
    found gone = find("persist", 0);
    CHECK(gone.rows == 4);

    for (unsigned turn = 0; turn < 16; turn++) {
        arena_free_persist(cache[turn]);
        arena_free_persist(cache[turn + 32]);
    }
    arena_free_persist(log);
    f = find("persist", first);
    CHECK(f.row.count == 0 && f.row.bytes == 0 && f.row.count_ever == 16 && f.row.age == 0.0);
    CHECK(find("stray", third).row.bytes == 0 && find("persist", second).row.bytes == 0);
}

/* What rises at each turn has a history that rises; what comes and goes in a turn has a flat one. */
static void test_the_history_is_of_low_water_marks(void) {
    char *kept[1000];
    int rising = 0, flat = 0;
    for (unsigned turn = 0; turn < 1000; turn++) {
        arena_tick *tick = arena_begin("history");
        kept[turn] = arena_alloc_persist(10), rising = __LINE__;
        arena_free_persist(arena_alloc_persist(5)), flat = __LINE__;
        CHECK(arena_end(tick) == ARENA_OK);
    }
    found f = {.line = rising, .wanted = "persist"};
    arena_point last = {0, 0};
    CHECK(arena_escapes(look, &f) > 0);
    /* the history is good during the call only, so it is looked at by hand below */
    (void)last;
    CHECK(f.row.points >= 32 && f.row.points <= 65 && f.row.turn == 1000);
    f = find("persist", flat);
    CHECK(f.row.bytes == 0 && f.row.count_ever == 1000);
    for (unsigned turn = 0; turn < 1000; turn++) arena_free_persist(kept[turn]);
}

static void check_rising(const arena_escape *row, void *arg) {
    const int *line = arg;
    if (!row->site_depth || row->site[0].line != *line) return;
    for (size_t i = 1; i < row->points; i++) {
        CHECK(row->history[i].turn >= row->history[i - 1].turn);
        CHECK(row->history[i].low >= row->history[i - 1].low);
    }
    CHECK(row->history[0].low == 8 && row->history[row->points - 1].low == 200 * 8);
}

static void test_a_history_rises_with_what_it_counts(void) {
    char *kept[200];
    int line = 0;
    for (unsigned turn = 0; turn < 200; turn++) {
        arena_tick *tick = arena_begin("rises");
        kept[turn] = arena_alloc_persist(8), line = __LINE__;
        CHECK(arena_end(tick) == ARENA_OK);
    }
    CHECK(arena_escapes(check_rising, &line) > 0);
    for (unsigned turn = 0; turn < 200; turn++) arena_free_persist(kept[turn]);
}

/* What is alive between two events counts for the whole time between them. */
static void check_plateau(const arena_escape *row, void *arg) {
    const int *line = arg;
    bool flat = false;
    if (!row->site_depth || row->site[0].line != *line) return;
    for (size_t i = 0; i < row->points; i++) {
        CHECK(i == 0 || row->history[i].turn >= row->history[i - 1].turn);
        flat |= row->history[i].turn > 72 && row->history[i].turn < 80 && row->history[i].low == 16;
    }
    CHECK(flat && row->history[row->points - 1].low == 24);
}

static void test_a_history_knows_how_long_nothing_happened(void) {
    char *kept[3];
    size_t count = 0;
    int line = 0;
    for (unsigned turn = 1; turn <= 210; turn++) {
        arena_tick *tick = arena_begin("plateau");
        bool comes = turn <= 70 ? turn % 2 : turn == 71 || turn == 72 || turn == 200;
        if (turn <= 70 && !comes) arena_free_persist(kept[--count]);
        if (comes) kept[count++] = arena_alloc_persist(8), line = __LINE__;
        CHECK(arena_end(tick) == ARENA_OK);
    }
    CHECK(arena_escapes(check_plateau, &line) > 0);
    while (count) arena_free_persist(kept[--count]);
}

/* A table that grows: what it had is freed before what takes its place has escaped. At the end of each
 * turn one of them is alive, so the history has no gap. */
static void check_no_gap(const arena_escape *row, void *arg) {
    const int *line = arg;
    if (!row->site_depth || row->site[0].line != *line) return;
    for (size_t i = 1; i < row->points; i++) CHECK(row->history[i].low >= row->history[i - 1].low);
    CHECK(row->history[0].low == 8 && row->history[row->points - 1].low == 8 * 40);
}

static void test_a_table_that_grows_has_no_gap_in_its_history(void) {
    char *table = NULL;
    int line = 0;
    for (unsigned turn = 1; turn <= 400; turn++) {
        arena_tick *tick = arena_begin("table");
        if (turn % 10 == 1) {
            arena_free_persist(table);
            table = arena_alloc_persist(8 * (turn / 10 + 1)), line = __LINE__;
        }
        CHECK(arena_end(tick) == ARENA_OK);
    }
    CHECK(arena_escapes(check_no_gap, &line) > 0);
    arena_free_persist(table);
}

static void test_a_row_is_as_old_as_what_lives_without_a_break(void) {
    int line = 0;
    for (unsigned turn = 0; turn < 2; turn++) {
        char *kept = arena_strdup_persist("x");
        line = __LINE__ - 1;
        double age = find("persist", line).row.age;
        CHECK(age >= 0 && age < 0.15);
        (void)usleep(200000);
        CHECK(find("persist", line).row.age >= 0.2);
        arena_free_persist(kept);
    }
}

/* The parentheses keep the macro away: a call from a file without ARENA_SITES. */
static void test_a_call_that_says_no_place_has_none(void) {
    int line = __LINE__ + 1;
    char *told = arena_strdup_persist("told");
    char *untold = (arena_strdup_persist)("untold");
    CHECK(find("persist", line).row.count == 1);
    arena_free_persist(told);
    arena_free_persist(untold);
}

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
}

/* Keys that are made to have one hash, as sites.c works it out. */
static void test_sites_with_one_hash_are_two(void) {
    const arena_frame one = {"one.c", "f", 1}, two = {"two.c", "g", 2};
    uintptr_t a[2] = {111, 222}, b[2] = {333, 0};
    b[1] = (uintptr_t)(mix(2, a[0]) ^ a[1] ^ mix(2, b[0]));
    uint32_t first = arena__site_add(a, 2, &one, 1), second = arena__site_add(b, 2, &two, 1);
    CHECK(first && second && first != second);
    CHECK(arena__site_find(a, 2) == first && arena__site_find(b, 2) == second);
}

static void test_arguments_may_allocate_too(void) {
    arena_tick *tick = arena_begin("nested");
    int line = __LINE__ + 1;
    char *kept = arena_strdup_persist(arena_printf(tick, "%s", arena_strdup(tick, "inner")));
    CHECK(find("persist", line).row.count == 1);
    CHECK(arena_end(tick) == ARENA_OK);
    arena_free_persist(kept);
}

static arena__chunk *chunk_of(arena_tick *tick) {
    return tick->current;
}

/* A pinned chunk is held once, by the oldest view that lives. */
static void test_a_pin_is_held_by_the_view_that_lives(void) {
    static const uintptr_t keys[2] = {1, 2};
    const arena_frame one = {"one.py", "f", 1}, two = {"two.py", "g", 2};
    uint32_t first = arena__site_add(&keys[0], 1, &one, 1), second = arena__site_add(&keys[1], 1, &two, 1);
    arena_tick *tick = arena_begin("pins");
    CHECK(arena_alloc(tick, 100) != NULL);
    arena__chunk *chunk = chunk_of(tick);
    arena__pin(chunk);
    arena__view *a = arena__view_add(chunk, first), *b = arena__view_add(chunk, second);
    CHECK(find("pin", 0).row.count_ever == 0);
    CHECK(arena_end(tick) == ARENA_OK);
    CHECK(find("pin", 1).row.bytes == ARENA__CHUNK_MIN && find("pin", 1).row.count == 1);
    CHECK(find("pin", 2).row.bytes == 0 && find("pin", 2).row.count == 1);
    arena__view_gone(a);
    CHECK(find("pin", 1).row.bytes == 0 && find("pin", 1).row.count == 0);
    CHECK(find("pin", 2).row.bytes == ARENA__CHUNK_MIN);
    arena__view_gone(b);
    CHECK(find("pin", 2).row.bytes == 0 && find("pin", 2).row.count == 0);
    arena__unpin(chunk);
    CHECK(stats().pinned == 0);
}

static void *no_map(size_t size) {
    (void)size;
    return NULL;
}

static void *no_resize(void *old, size_t size) {
    (void)old, (void)size;
    return NULL;
}

/* Before anybody has asked for sites, or when there is no memory for their tables. */
static void test_without_tables_nothing_is_recorded_and_nothing_fails(void) {
    arena__os real = arena__system;
    const arena_frame frame = {"f.c", "f", 1};
    const uintptr_t key = 1;
    const arena_frame *frames;
    arena__system.map = no_map;
    CHECK(arena_trace(1) == ARENA_E_NOMEM && arena__trace_hold() == ARENA_E_NOMEM);
    CHECK(arena_audit(1 << 20) == ARENA_E_NOMEM && arena_audit_now() == 0);
    arena__system = real;
    CHECK(arena__site_find(&key, 1) == 0 && arena__site_add(&key, 1, &frame, 1) == 0);
    CHECK(arena__site_frames(0, &frames) == 0 && frames == NULL);
    CHECK(arena__name_turn("x") == 0 && arena__row_add(ARENA_ESCAPE_PERSIST, 0, NULL, 1) == 0);
    arena_tick *tick = arena_begin("none");
    CHECK(arena__row_use(0, 0, tick) == 0 && arena__view_add(NULL, 0) == NULL);
    CHECK(arena_end(tick) == ARENA_OK);
    arena__row_sub(0, 1), arena__row_resize(0, 1, 2), arena__row_example(0, "x", 1);
    CHECK(!arena__row_wants_example(0));
}

static void test_each_call_of_the_macro_form_says_where_it_stands(void) {
    arena_tick *tick = arena_begin("macros");
    char *piece = arena_realloc(tick, arena_zalloc(tick, 10), 10, 5000);
    CHECK(piece && arena_strndup(tick, "text", 2) && arena_memdup(tick, "x", 1));
    CHECK(arena_strbuf_new(tick, 10) && arena_alloc(tick, 0));
    int line = __LINE__ + 1;
    char *kept[] = {arena_zalloc_persist(4), arena_strndup_persist("text", 2), arena_printf_persist("%d", 5)};
    kept[0] = arena_realloc_persist(kept[0], 8);
    CHECK(find("persist", line).row.bytes == 8 + 3 + 2 && find("persist", line).row.count == 3);
    for (unsigned i = 0; i < 3; i++) arena_free_persist(kept[i]);
    CHECK(find("persist", line).row.bytes == 0 && arena_end(tick) == ARENA_OK);
}

static void test_an_example_is_cut_between_characters_and_the_first_one_stays(void) {
    char long_text[300];
    for (size_t i = 0; i + 1 < sizeof long_text; i += 2) memcpy(long_text + i, "\xC3\xA9", 2);
    char *kept = arena_strdup_persist("x");
    uint32_t row = arena__persist_row(kept);
    CHECK(arena__row_wants_example(row));
    arena__row_example(row, long_text, sizeof long_text);
    CHECK(!arena__row_wants_example(row));
    arena__row_example(row, "late", 4);
    arena_free_persist(kept);
    CHECK(arena__persist_row(NULL) == 0);
}

/* A view for which there was no memory is a view all the same; a grave is not dug. */
static void test_what_there_is_no_memory_for_is_let_go_of(void) {
    arena__os real = arena__system;
    CHECK(arena_audit(1 << 20) == ARENA_OK);
    arena_tick *tick = arena_begin("no memory");
    CHECK(arena_alloc(tick, 10) != NULL);
    arena__system.resize = no_resize;
    CHECK(arena__view_add(chunk_of(tick), 0) == NULL);
    CHECK(arena_alloc(tick, 10) != NULL && arena_end(tick) == ARENA_OK);
    arena__system = real;
    CHECK(stats().quarantined == 0);
    CHECK(arena_audit(0) == ARENA_OK);
}

static void test_a_long_tick_knows_all_its_pieces(void) {
    volatile char *piece = NULL;
    CHECK(arena_audit(1 << 20) == ARENA_OK);
    arena_tick *tick = arena_begin("long");
    for (unsigned i = 0; i < 100; i++) CHECK(arena_alloc(tick, 16) != NULL);
    int line = __LINE__ + 1;
    piece = arena_strdup(tick, "last");
    CHECK(arena_end(tick) == ARENA_OK && piece[0] == 'l');
    CHECK(find("stale", line).row.uses == 1);
    tick = arena_begin("empty");
    CHECK(arena_end(tick) == ARENA_OK && arena_audit(0) == ARENA_OK);
}

static void test_names_and_sites_that_no_longer_fit_are_counted_together(void) {
    char name[32];
    for (unsigned i = 0; i < 1100; i++) {
        (void)snprintf(name, sizeof name, "many %u", i);
        arena_tick *tick = arena_begin(name);
        arena_free_persist(arena_strdup_persist("x"));
        CHECK(arena_end(tick) == ARENA_OK);
    }
    found f = {.wanted = "persist"};
    CHECK(arena_escapes(look, &f) > 1000);
    const arena_frame frame = {"many.py", "f", 1};
    uint32_t number = 1;
    for (uintptr_t key = 10; key < 70000 && number; key++) number = arena__site_add(&key, 1, &frame, 1);
    CHECK(number == 0);
    uintptr_t known = 10;
    CHECK(arena__site_find(&known, 1) != 0);
}

/* ---- Audit ------------------------------------------------------------------------------------ */

static void test_the_piece_that_was_touched_is_the_one_that_is_named(void) {
    CHECK(arena_audit(1 << 20) == ARENA_OK);
    arena_tick *tick = arena_begin("pieces");
    int first = __LINE__ + 1;
    char *one = arena_strdup(tick, "one");
    int second = __LINE__ + 1;
    volatile char *two = arena_strdup(tick, "two");
    CHECK(one && arena_end(tick) == ARENA_OK);
    CHECK(two[0] == 't');
    CHECK(find("stale", first).row.uses == 0 && find("stale", second).row.uses == 1);
    CHECK(arena_audit(0) == ARENA_OK);
}

static void test_a_dead_tick_is_read_and_noted(void) {
    CHECK(arena_audit(1 << 20) == ARENA_OK && arena_audit_now() == 1 << 20);
    arena_tick *tick = arena_begin("audited");
    int line = __LINE__ + 1;
    volatile char *text = arena_strdup(tick, "the true old bytes");
    CHECK(arena_end(tick) == ARENA_OK);
    CHECK(stats().quarantined >= ARENA__CHUNK_MIN && stats().chunks == 0);
    CHECK(text[4] == 't' && text[17] == 's');
    text[0] = 'T';
    CHECK(text[0] == 'T');
    found f = find("stale", line);
    CHECK(f.row.uses == 1 && !strcmp(f.row.tick, "audited") && f.row.used_depth == 1);
    CHECK(f.row.count == 0 && f.row.bytes == 0);
    CHECK(strstr(f.row.used[0].file, "test_sites") || f.row.used[0].file[0] == '?');
    CHECK(arena_audit(0) == ARENA_OK && stats().quarantined == 0);
}

static void test_the_oldest_goes_when_the_budget_is_used_up(void) {
    char *pieces[8];
    CHECK(arena_audit(4 * ARENA__CHUNK_MIN) == ARENA_OK);
    for (unsigned i = 0; i < 8; i++) {
        arena_tick *tick = arena_begin("budget");
        pieces[i] = arena_strdup(tick, "x");
        CHECK(arena_end(tick) == ARENA_OK);
        CHECK(stats().quarantined <= 4 * ARENA__CHUNK_MIN);
    }
    CHECK(stats().quarantined == 4 * ARENA__CHUNK_MIN && pieces[7][0] == 'x');
    CHECK(arena_audit(0) == ARENA_OK && stats().quarantined == 0);
}

static void test_a_secret_is_not_kept(void) {
    CHECK(arena_audit(1 << 20) == ARENA_OK);
    arena_tick *tick = arena_begin("secret");
    CHECK(arena_wipe(tick) == ARENA_OK && arena_strdup(tick, "secret") != NULL);
    CHECK(arena_end(tick) == ARENA_OK && stats().quarantined == 0);
    CHECK(arena_audit(0) == ARENA_OK);
}

static void other_handler(int number) {
    (void)number;
    _exit(42);
}

static void other_handler_of_more(int number, siginfo_t *info, void *context) {
    (void)number, (void)info, (void)context;
    _exit(43);
}

/* What a child exits with that touches a page of nobody's while a dead tick is kept. */
static int exit_of(bool handled, int flags) {
    pid_t child = fork();
    if (child == 0) {
        struct sigaction action = {.sa_flags = flags};
        if (flags & SA_SIGINFO)
            action.sa_sigaction = other_handler_of_more;
        else
            action.sa_handler = handled ? other_handler : SIG_DFL;
        (void)sigaction(SIGSEGV, &action, NULL);
        if (arena_audit(1 << 20) != ARENA_OK) _exit(1);
        arena_tick *tick = arena_begin("kept");
        volatile char *dead = arena_strdup(tick, "x");
        if (arena_end(tick) != ARENA_OK || dead[0] != 'x') _exit(3);
        volatile char *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        page[0] = 1;
        _exit(2);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* A fault that is not in a dead tick is the business of whoever handled it before the first audit. */
static void test_other_faults_go_to_the_handler_before(void) {
    if (arena__on_valgrind) return; /* it tells of the fault itself, and has its own exit status */
    CHECK(exit_of(true, 0) == 42);
    CHECK(exit_of(true, SA_SIGINFO) == 43);
    CHECK(exit_of(false, 0) == -SIGSEGV);
}

static void test_more_touches_than_fit_are_let_go_on(void) {
    enum { PAGES = 1500 };
    CHECK(arena_audit(64 << 20) == ARENA_OK);
    arena_tick *tick = arena_begin("touches");
    int line = __LINE__ + 1;
    volatile char *block = arena_alloc(tick, PAGES * 4096);
    CHECK(block && arena_end(tick) == ARENA_OK);
    unsigned sum = 0;
    for (unsigned i = 0; i < PAGES; i++) sum += (unsigned char)block[i * 4096];
    CHECK(sum == 0);
    CHECK(find("stale", line).row.uses == 1024);
    tick = arena_begin("touches");
    block = arena_alloc(tick, 8);
    CHECK(arena_end(tick) == ARENA_OK && block[0] == 0);
    CHECK(find("stale", __LINE__ - 2).row.uses == 1);
    CHECK(arena_audit(0) == ARENA_OK);
}

static void test_words_of_an_audit(void) {
    CHECK(arena_audit_words(NULL) == 0 && arena_audit_words("") == 0 && arena_audit_words("0") == 0);
    CHECK(arena_audit_words("1") == (size_t)256 << 20 && arena_audit_words("65536") == 65536);
    CHECK(arena_audit_words("x") == SIZE_MAX && arena_audit_words("-1") == SIZE_MAX);
    CHECK(arena_audit_words("1x") == SIZE_MAX);
}

int main(void) {
    RUN(test_off_records_nothing);
    RUN(test_without_tables_nothing_is_recorded_and_nothing_fails);
    RUN(test_other_faults_go_to_the_handler_before); /* before the first audit of this process */
    RUN(test_a_depth_is_from_0_to_32);
    RUN(test_planted_escapes_are_named_by_file_and_line);
    RUN(test_the_history_is_of_low_water_marks);
    RUN(test_a_history_rises_with_what_it_counts);
    RUN(test_a_history_knows_how_long_nothing_happened);
    RUN(test_a_table_that_grows_has_no_gap_in_its_history);
    RUN(test_a_row_is_as_old_as_what_lives_without_a_break);
    RUN(test_a_call_that_says_no_place_has_none);
    RUN(test_sites_with_one_hash_are_two);
    RUN(test_arguments_may_allocate_too);
    RUN(test_a_pin_is_held_by_the_view_that_lives);
    RUN(test_a_dead_tick_is_read_and_noted);
    RUN(test_the_piece_that_was_touched_is_the_one_that_is_named);
    RUN(test_the_oldest_goes_when_the_budget_is_used_up);
    RUN(test_a_secret_is_not_kept);
    RUN(test_more_touches_than_fit_are_let_go_on);
    RUN(test_words_of_an_audit);
    RUN(test_each_call_of_the_macro_form_says_where_it_stands);
    RUN(test_an_example_is_cut_between_characters_and_the_first_one_stays);
    RUN(test_what_there_is_no_memory_for_is_let_go_of);
    RUN(test_a_long_tick_knows_all_its_pieces);
    RUN(test_names_and_sites_that_no_longer_fit_are_counted_together);
    CHECK(arena_trace(0) >= 0);
    return 0;
}
