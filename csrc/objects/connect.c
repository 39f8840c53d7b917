/* connect.c: the tables of link.h, and what cffi exposes. */
#include "objects.h"

#include "../arena.h" /* ARENA_VERSION */

bool arena__on_valgrind, arena__checking;

__attribute__((constructor)) static void set_up(void) {
    if (getenv("ARENA_UNCHECKED")) return;
    arena__on_valgrind = arena__valgrind(ARENA__VG_RUNNING, 0, 0, 0, 0) != 0;
    arena__checking = arena__on_valgrind;
#ifdef ARENA__ASAN
    arena__checking = true;
#endif
    arena__check_pool_begin(&arena__region);
}

/* A host that nobody listens to. */
static uint32_t no_site(const void *tick) {
    (void)tick;
    return 0;
}

static uint32_t no_row(const void *tick, uint32_t site, size_t size) {
    (void)tick, (void)site, (void)size;
    return 0;
}

static void not_gone(uint32_t row, size_t size) {
    (void)row, (void)size;
}

static void not_resized(uint32_t row, size_t old_size, size_t size) {
    (void)row, (void)old_size, (void)size;
}

static bool not_wanted(uint32_t row) {
    (void)row;
    return false;
}

static void not_told(uint32_t row, const char *text, size_t size) {
    (void)row, (void)text, (void)size;
}

static const arena_link_host NOBODY = {ARENA_LINK_VERSION, no_site, no_row, not_gone, not_resized,
                                       not_wanted, not_told};

static bool hooked;
static const void *connected;

static const arena_link_objects TABLE = {ARENA_LINK_VERSION, arena__capture_begin,
                                         arena__capture_end};

const char *arena_objects_version(void) {
    return ARENA_VERSION;
}

int arena_objects_connect(const void *host) {
    const arena_link_host *table = host ? host : &NOBODY;
    if (table->version != ARENA_LINK_VERSION) return -1;
    if (hooked && host == connected) return 0;
    if (arena__captures_open()) return -3;
    if (!hooked) {
        if (!arena__hooks_install()) return -2;
        arena__captures_set_up();
    }
    arena__blocks_forget_rows();
    hooked = true;
    arena__host = *table;
    connected = host;
    return 0;
}

const void *arena_objects_host(void) {
    return connected;
}

const void *arena_objects_table(void) {
    return hooked ? &TABLE : NULL;
}

void arena_objects_stats_get(arena_objects_stats *out) {
    *out = (arena_objects_stats){
        .open_count = arena__captures_open(),
        .captured = arena__counted.captured_bytes,
        .captured_count = arena__counted.captured,
        .escaped = arena__counted.escaped_bytes,
        .escaped_count = arena__counted.escaped,
        .spans = (uint64_t)arena__region.in_use << ARENA__SPAN_SHIFT,
        .cached = (uint64_t)arena__region.dirty_count << ARENA__SPAN_SHIFT,
        .given_back = arena__region.given_back,
        .reserved = arena__region.size,
    };
}

uint64_t arena_objects_trim(uint32_t spans) {
    uint32_t dirty = arena__region.dirty_count;
    size_t given = arena__spans_trim(dirty > spans ? dirty - spans : 0);
    return given ? given : arena__heap_trim();
}

int arena_objects_gil_held(void) {
    return PyGILState_Check();
}
