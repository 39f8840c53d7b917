/* objects_host.c: what the tests of the objects module put at its two ends: a host that records what it
 * is told, and allocator hooks of another tool. Compiled by tests/objects_host.py, called by ctypes.
 */
#include "../csrc/objects/link.h"

#include <stdlib.h>
#include <string.h>

/* Each row is one block. */
enum { ROWS = 1 << 18, TEXT = 300 };

typedef struct row {
    const void *tick;
    size_t size;
    uint32_t site;
    uint32_t live;
    char text[TEXT];
} row;

uint32_t site_now;   /* what site() answers */
uint32_t rows_made;  /* row numbers are 1 .. rows_made */
uint32_t rows_live;
uint32_t sites_asked;
uint32_t mistakes; /* calls that make no sense */
uint32_t rows_left = ROWS - 1;
void *(*allocate)(size_t size); /* what site() calls, and `release` with what it got */
void (*release)(void *block);
bool examples = true;
static row *rows;

static uint32_t site(const void *tick) {
    (void)tick;
    sites_asked++;
    if (allocate) release(allocate(1000));
    return site_now;
}

static uint32_t escaped(const void *tick, uint32_t at, size_t size) {
    if (!rows) rows = calloc(ROWS, sizeof *rows);
    if (!rows || !rows_left) return 0;
    rows_left--;
    rows_live++;
    rows[++rows_made] = (row){.tick = tick, .size = size, .site = at, .live = 1};
    return rows_made;
}

static bool known(uint32_t number, size_t size) {
    bool right = number && number <= rows_made && rows[number].live && rows[number].size == size;
    mistakes += !right;
    return right;
}

static void gone(uint32_t number, size_t size) {
    if (!known(number, size)) return;
    rows[number].live = 0;
    rows_live--;
}

static void resized(uint32_t number, size_t old_size, size_t size) {
    if (known(number, old_size)) rows[number].size = size;
}

static bool wants_example(uint32_t number) {
    (void)number;
    return examples;
}

static void example(uint32_t number, const char *text, size_t size) {
    if (size >= TEXT) mistakes++, size = TEXT - 1;
    memcpy(rows[number].text, text, size);
    rows[number].text[size] = 0;
}

const arena_link_host host = {ARENA_LINK_VERSION, site, escaped, gone, resized, wants_example, example};
const arena_link_host stale_host = {ARENA_LINK_VERSION + 1, site, escaped, gone, resized,
                                    wants_example, example};

row *row_at(uint32_t number) {
    return &rows[number];
}

/* The hook of another tool, which looks on. */
typedef struct allocator {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t count, size_t each);
    void *(*realloc)(void *ctx, void *block, size_t size);
    void (*free)(void *ctx, void *block);
} allocator;

static allocator below[3];

static size_t watched;

static void *watch_malloc(void *ctx, size_t size) {
    const allocator *next = ctx;
    watched++;
    return next->malloc(next->ctx, size);
}

static void *watch_calloc(void *ctx, size_t count, size_t each) {
    const allocator *next = ctx;
    return next->calloc(next->ctx, count, each);
}

static void *watch_realloc(void *ctx, void *block, size_t size) {
    const allocator *next = ctx;
    return next->realloc(next->ctx, block, size);
}

static void watch_free(void *ctx, void *block) {
    const allocator *next = ctx;
    next->free(next->ctx, block);
}

size_t watched_blocks(void) {
    return watched;
}

typedef void (*access)(int domain, allocator *allocator);

/* `get` and `set` are PyMem_GetAllocator and PyMem_SetAllocator; domain 1 is mem, 2 is object. */
void hook(access get, access set, int domain) {
    get(domain, &below[domain]);
    allocator watch = {&below[domain], watch_malloc, watch_calloc, watch_realloc, watch_free};
    set(domain, &watch);
}

void unhook(access set, int domain) {
    set(domain, &below[domain]);
}
