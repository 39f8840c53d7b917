/* sites.c: where memory was allocated, and the map of what escapes.
 *
 * A site is a stack of frames, kept once for good and named by a number: it is found by a key (for
 * Python the code objects and their instructions, for C the file and the line), so that recording one
 * that is known costs a look into a table. A row of the map is what is known of one kind of escape from
 * one site in ticks of one name. A piece of memory that escapes carries the number of its row, and
 * leaves the row when it is freed: so what a row counts as alive is exact.
 *
 * The tables have a fixed size and are mapped when sites are recorded for the first time: 31 MB
 * of addresses, of which only what is used becomes resident. A program that makes code or names for ever
 * fills them; what comes after that is counted in rows without a site or a name.
 *
 * One lock, taken after the pages lock where both are.
 */
#include "internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { SITES = 1 << 16, NAMES = 1 << 10, ROWS = 1 << 13, POINTS = 64, EXAMPLE = 120 };
enum { PIN_LISTS = 1 << 8, KEPT = 16 << 20 };
enum { SPARE_ROWS = 16 }; /* of the table: for what has no row of its own any more */
enum { CLEAR_AT = 128 };  /* empty rows are worth a walk through the table */

typedef struct site {
    uint64_t hash;
    uintptr_t *key;
    arena_frame *frames;
    uint32_t words, depth;
} site;

typedef struct name {
    char *text;
    uint64_t hash;
    uint64_t turns; /* ticks of that name that have begun, while sites were recorded */
} name;

typedef struct row {
    uint64_t count, bytes, count_ever, bytes_ever, uses;
    uint64_t first, last; /* numbers of ticks */
    uint64_t since;       /* nanoseconds of the clock, when it last became alive */
    uint64_t stride;      /* turns that a point covers */
    uint64_t turn;        /* of the last event */
    arena_point points[POINTS];
    uint32_t site, used, name, filled;
    int kind;
    _Atomic bool shown; /* it has an example */
    char example[EXAMPLE];
} row;

/* Numbers by their hash, at most half full: 0 is a free place. */
typedef struct tables {
    site sites[SITES]; /* 0 is "not known" */
    name names[NAMES]; /* 0 is "no name", the last one is for all that no longer fit */
    row rows[ROWS];    /* 0 is nobody's */
    uint32_t by_site[2 * SITES], by_name[2 * NAMES], by_row[2 * ROWS];
    uint32_t site_count, name_count, row_count;
    uint32_t free_rows; /* linked by `used` */
    uint32_t emptied;   /* rows that nothing of is alive any more, since they were last cleared */
    uint64_t turns;
    arena__view *pins[PIN_LISTS]; /* views, by their chunk */
    size_t kept_used;
    _Alignas(16) char kept[KEPT]; /* keys, frames and texts */
} tables;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tables *map;
static _Atomic int trace_depth;
_Atomic int arena__tracing;
uint32_t (*arena__site_outer)(void);

void arena__sites_lock(void) {
    (void)pthread_mutex_lock(&lock);
}

void arena__sites_unlock(void) {
    (void)pthread_mutex_unlock(&lock);
}

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
}

static uint64_t hash_text(const char *text) {
    uint64_t hash = 1;
    while (*text) hash = mix(hash, (unsigned char)*text++);
    return hash;
}

static uint64_t hash_key(const uintptr_t *key, uint32_t words) {
    uint64_t hash = words;
    for (uint32_t i = 0; i < words; i++) hash = mix(hash, key[i]);
    return hash;
}

static uint64_t hash_row(int kind, uint32_t at, uint32_t named) {
    return mix(mix(mix(2, (uint64_t)kind), at), named);
}

/* Walks the numbers that may have this hash. */
#define EACH_AT(index, hash, number)                                                              \
    for (uint32_t at_ = (uint32_t)(hash), number;                                                 \
         (number = (index)[at_++ % (sizeof(index) / sizeof *(index))]) != 0;)

static uint32_t find_site(uint64_t hash, const uintptr_t *key, uint32_t words) {
    EACH_AT(map->by_site, hash, number) {
        const site *s = &map->sites[number];
        if (s->hash == hash && s->words == words && !memcmp(s->key, key, words * sizeof *key))
            return number;
    }
    return 0;
}

static void enter(uint32_t *index, size_t size, uint64_t hash, uint32_t number) {
    uint32_t at = (uint32_t)hash;
    while (index[at % size]) at++;
    index[at % size] = number;
}

uint32_t arena__site_find(const uintptr_t *key, uint32_t words) {
    uint64_t hash = hash_key(key, words);
    arena__sites_lock();
    uint32_t number = map ? find_site(hash, key, words) : 0;
    arena__sites_unlock();
    return number;
}

/* Under the lock: room for what is kept for good. NULL when it is used up. */
static void *keep(size_t size) {
    size = (size + 7) & ~(size_t)7;
    if (size > sizeof map->kept - map->kept_used) return NULL;
    map->kept_used += size;
    return map->kept + map->kept_used - size;
}

static char *keep_text(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = keep(size);
    if (copy) memcpy(copy, text, size);
    return copy;
}

static bool keep_site(site *s, const uintptr_t *key, const arena_frame *frames) {
    s->key = keep(s->words * sizeof *key);
    s->frames = keep(s->depth * sizeof *frames);
    if (!s->key || !s->frames) return false;
    memcpy(s->key, key, s->words * sizeof *key);
    for (uint32_t i = 0; i < s->depth; i++) {
        s->frames[i] = (arena_frame){keep_text(frames[i].file), keep_text(frames[i].function),
                                     frames[i].line};
        if (!s->frames[i].file || !s->frames[i].function) return false;
    }
    return true;
}

/* Keeps a site of at least one frame. 0 when there is no room for it. */
uint32_t arena__site_add(const uintptr_t *key, uint32_t words, const arena_frame *frames,
                         uint32_t depth) {
    site fresh = {.hash = hash_key(key, words), .words = words, .depth = depth};
    if (!map) return 0;
    arena__sites_lock();
    uint32_t number = find_site(fresh.hash, key, words); /* another thread may have been faster */
    if (!number && map->site_count + 1 < SITES && keep_site(&fresh, key, frames)) {
        number = ++map->site_count;
        map->sites[number] = fresh;
        enter(map->by_site, 2 * SITES, fresh.hash, number);
    }
    arena__sites_unlock();
    return number;
}

/* The frames of a site, innermost first. They stay where they are. Under the lock or not: a number
 * that somebody has was written before. */
uint32_t arena__site_frames(uint32_t number, const arena_frame **frames) {
    *frames = number ? map->sites[number].frames : NULL;
    return number ? map->sites[number].depth : 0;
}

void arena_at(const char *file, int line, const char *function) {
    if (!ARENA__LOAD(arena__tracing)) return;
    arena__self.at = (arena_frame){file, function, line};
}

/* Where the caller is: as its macro has said, else as who runs it knows. The texts of a macro are
 * literals, so their addresses are their key. */
uint32_t arena__site_here(void) {
    arena_frame at = arena__self.at;
    if (!at.file) return arena__site_outer ? arena__site_outer() : 0;
    arena__self.at.file = NULL;
    uintptr_t key[3] = {(uintptr_t)at.file, (uintptr_t)at.function, (uintptr_t)at.line};
    uint32_t number = arena__site_find(key, 3);
    return number ? number : arena__site_add(key, 3, &at, 1);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

static uint64_t now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* The number of a tick's name; 0 for none. Counts a turn of it. */
uint32_t arena__name_turn(const char *text) {
    uint32_t number = 0;
    arena__sites_lock();
    if (map) map->turns++;
    if (map && text && *text) {
        uint64_t hash = hash_text(text);
        EACH_AT(map->by_name, hash, found) {
            if (map->names[found].hash != hash || strcmp(map->names[found].text, text) != 0) continue;
            number = found;
            break;
        }
        char *copy = NULL;
        if (!number && map->name_count + 2 < NAMES && (copy = keep_text(text)) != NULL) {
            number = ++map->name_count;
            map->names[number] = (name){copy, hash, 0};
            enter(map->by_name, 2 * NAMES, hash, number);
        }
        if (!number) number = NAMES - 1;
        map->names[number].turns++;
    }
    arena__sites_unlock();
    return number;
}

static uint64_t turn_of(const row *r) {
    return r->name ? map->names[r->name].turns : map->turns;
}

static void add_point(row *r, uint64_t turn, uint64_t low) {
    if (r->filled == POINTS) {
        for (uint32_t i = 0; i < POINTS / 2; i++) {
            arena_point a = r->points[2 * i], b = r->points[2 * i + 1];
            r->points[i] = (arena_point){a.turn, a.low < b.low ? a.low : b.low};
        }
        r->filled = POINTS / 2;
        r->stride *= 2;
    }
    r->points[r->filled++] = (arena_point){turn, low};
}

/* The history up to now. What counts is how much was alive when a turn was over, for within a turn a
 * table that grows is freed before the larger one that takes its place has escaped. So nothing is
 * settled before the turn has changed: `bytes` have been alive since the turn of the last event. */
static void roll(row *r) {
    uint64_t turn = turn_of(r);
    if (!r->filled) {
        r->stride = 1;
        add_point(r, turn, r->bytes);
        r->turn = turn;
        return;
    }
    if (turn == r->turn) return;
    arena_point *point = &r->points[r->filled - 1];
    uint64_t end = point->turn + r->stride; /* of the stretch that the last event was in */
    bool fresh = r->turn == point->turn;    /* and it began with it: nothing was settled in it */
    if (fresh || r->bytes < point->low) point->low = r->bytes;
    if (turn - point->turn >= 2 * r->stride && point->low != r->bytes) add_point(r, end, r->bytes);
    if (turn >= r->points[r->filled - 1].turn + r->stride) add_point(r, turn, r->bytes);
    r->turn = turn;
}

/* Under the lock, once the numbers of a row have changed. */
static void note(row *r, const arena_tick *tick) {
    r->last = tick ? tick->number : arena__ticks_begun();
    if (!r->first) r->first = r->last;
}

/* A tick that began when nobody recorded sites has no number for its name. */
static uint32_t name_of(const arena_tick *tick) {
    return tick && tick->depth ? tick->named : 0;
}

/* Under the lock: the table is full, and rows of which nothing is alive make room, but for those of stale
 * uses, which are no less true when the handle has gone. */
static void clear_rows(void) {
    map->emptied = 0;
    memset(map->by_row, 0, sizeof map->by_row);
    for (uint32_t number = map->row_count; number; number--) {
        row *r = &map->rows[number];
        if (r->kind && (r->count || r->uses)) {
            enter(map->by_row, 2 * ROWS, hash_row(r->kind, r->site, r->name), number);
            continue;
        }
        r->kind = 0;
        r->used = map->free_rows;
        map->free_rows = number;
    }
}

/* Under the lock: the row of these, made when there is none. When the table is full there is one for all
 * other places of its kind. NULL while there is no table. */
static row *row_of(int kind, uint32_t at, uint32_t named) {
    if (!map) return NULL;
    uint64_t hash = hash_row(kind, at, named);
    EACH_AT(map->by_row, hash, number) {
        row *r = &map->rows[number];
        if (r->kind == kind && r->site == at && r->name == named) return r;
    }
    bool other = !at && named == NAMES - 1;
    if (!map->free_rows && map->row_count + 1 >= ROWS - SPARE_ROWS && map->emptied >= CLEAR_AT)
        clear_rows();
    uint32_t number = map->free_rows;
    if (number)
        map->free_rows = map->rows[number].used;
    else if (map->row_count + 1 < ROWS - (other ? 0 : SPARE_ROWS))
        number = ++map->row_count;
    else
        return row_of(kind, 0, NAMES - 1);
    row *r = &map->rows[number];
    memset(r, 0, sizeof *r);
    r->kind = kind;
    r->site = at;
    r->name = named;
    enter(map->by_row, 2 * ROWS, hash, number);
    return r;
}

/* Under the lock: one more piece of `size` bytes. */
static uint32_t add(int kind, uint32_t at, const arena_tick *tick, size_t size) {
    row *r = row_of(kind, at, name_of(tick));
    if (!r) return 0;
    roll(r);
    if (!r->count++) {
        r->since = now();
        ARENA__STORE(r->shown, false); /* the example is of something that is alive */
    }
    r->bytes += size;
    r->count_ever++;
    r->bytes_ever += size;
    note(r, tick);
    return (uint32_t)(r - map->rows);
}

static void sub(uint32_t number, size_t size) {
    row *r = &map->rows[number];
    roll(r);
    r->bytes -= size;
    if (!--r->count) map->emptied++;
    note(r, NULL);
}

/* `size` bytes from that site have escaped. Returns the number of the row, 0 when there is none. */
uint32_t arena__row_add(int kind, uint32_t at, const arena_tick *tick, size_t size) {
    arena__sites_lock();
    uint32_t number = add(kind, at, tick, size);
    arena__sites_unlock();
    return number;
}

void arena__row_sub(uint32_t number, size_t size) {
    if (!number) return;
    arena__sites_lock();
    sub(number, size);
    arena__sites_unlock();
}

void arena__row_resize(uint32_t number, size_t old_size, size_t size) {
    if (!number) return;
    arena__sites_lock();
    row *r = &map->rows[number];
    roll(r);
    r->bytes += size - old_size;
    if (size > old_size) r->bytes_ever += size - old_size;
    note(r, NULL);
    arena__sites_unlock();
}

/* A use, at the site `used`, of memory from the site `at` whose tick has ended. */
uint32_t arena__row_use(uint32_t at, uint32_t used, const arena_tick *tick) {
    uint32_t number = 0;
    arena__sites_lock();
    row *r = row_of(ARENA_ESCAPE_STALE, at, name_of(tick));
    if (r) {
        roll(r);
        r->uses++;
        if (used) r->used = used;
        note(r, tick);
        number = (uint32_t)(r - map->rows);
    }
    arena__sites_unlock();
    return number;
}

bool arena__row_wants_example(uint32_t number) {
    return number && !ARENA__LOAD(map->rows[number].shown);
}

/* Shows what such a piece is. A text that is too long is cut, between characters of UTF-8. */
void arena__row_example(uint32_t number, const char *text, size_t size) {
    if (!number) return;
    if (size > EXAMPLE - 1) {
        size = EXAMPLE - 1;
        while (size && ((unsigned char)text[size] & 0xC0) == 0x80) size--;
    }
    arena__sites_lock();
    row *r = &map->rows[number];
    if (!r->shown) memcpy(r->example, text, size);
    ARENA__STORE(r->shown, true);
    arena__sites_unlock();
}

/* Memory that outlives ticks by what it is: persisted, or a stray. */
uint32_t arena__escaped(int kind, size_t size) {
    uint32_t at = arena__site_here();
    return arena__row_add(kind, at, arena_current(), size);
}

/* ---- Views ----------------------------------------------------------------------------------- */

/* A chunk that is pinned past the end of its tick is held whole, and once: it counts for the oldest of
 * the views that hold it, and for the next one when that goes. */

static arena__view **views_of(const arena__chunk *chunk) {
    return &map->pins[mix(3, (uintptr_t)chunk) % PIN_LISTS];
}

/* A view of the chunk, taken at that site. NULL when there is no memory: then nobody is told of it. */
arena__view *arena__view_add(arena__chunk *chunk, uint32_t at) {
    arena__view *view = map ? arena__system.resize(NULL, sizeof *view) : NULL;
    if (!view) return NULL;
    *view = (arena__view){.chunk = chunk, .at = at};
    arena__sites_lock();
    arena__view **end = views_of(chunk);
    while (*end) end = &(*end)->next;
    *end = view;
    arena__sites_unlock();
    return view;
}

/* Under the pages lock: the chunk has outlived its tick. */
void arena__views_escaped(const arena_tick *tick, const arena__chunk *chunk) {
    bool first = true;
    if (!map) return;
    arena__sites_lock();
    for (arena__view *view = *views_of(chunk); view; view = view->next) {
        if (view->chunk != chunk) continue;
        if (!view->row) {
            view->size = first ? chunk->size : 0;
            view->row = add(ARENA_ESCAPE_PIN, view->at, tick, view->size);
        }
        first = false;
    }
    arena__sites_unlock();
}

void arena__view_gone(arena__view *view) {
    arena__sites_lock();
    arena__view **at = views_of(view->chunk);
    while (*at != view) at = &(*at)->next;
    *at = view->next;
    if (view->row) sub(view->row, view->size);
    if (view->size) {
        arena__view *heir = *views_of(view->chunk);
        while (heir && heir->chunk != view->chunk) heir = heir->next;
        if (heir && heir->row) {
            row *r = &map->rows[heir->row];
            heir->size = view->size;
            roll(r);
            r->bytes += view->size;
            r->bytes_ever += view->size;
            note(r, NULL);
        }
    }
    arena__sites_unlock();
    arena__system.release(view);
}

/* ---- For users ------------------------------------------------------------------------------- */

static bool have_map(void) {
    arena__sites_lock();
    if (!map && (map = arena__system.map(sizeof *map)) != NULL) arena__check_root(map->pins, sizeof map->pins);
    arena__sites_unlock();
    return map != NULL;
}

int arena_tracing(void) {
    return ARENA__LOAD(trace_depth);
}

int arena_trace(int depth) {
    if (depth < 0 || depth > ARENA__DEPTH) return arena__fail(ARENA_E_INVALID);
    if (depth && !have_map()) return arena__fail(ARENA_E_NOMEM);
    int before = atomic_exchange(&trace_depth, depth);
    ARENA__ADD(arena__tracing, (depth > 0) - (before > 0));
    return before;
}

/* A tick that records sites by itself begins, and ends. */
int arena__trace_hold(void) {
    if (!have_map()) return arena__fail(ARENA_E_NOMEM);
    ARENA__ADD(arena__tracing, 1);
    return ARENA_OK;
}

void arena__trace_drop(void) {
    ARENA__SUB(arena__tracing, 1);
}

static const char *const KINDS[] = {"", "persist", "pin", "stale", "stray", "object"};

static void fill(arena_escape *out, const row *r, arena_point *points) {
    uint64_t turn = turn_of(r);
    uint32_t filled = r->filled; /* the turn that runs is not settled: it is told as it is now */
    if (filled > 1 && r->points[filled - 1].turn == turn) filled--;
    memcpy(points, r->points, filled * sizeof *points);
    points[filled] = (arena_point){turn, r->bytes};
    *out = (arena_escape){
        .kind = KINDS[r->kind],
        .tick = r->name == NAMES - 1 ? "(others)" : map->names[r->name].text,
        .count = r->count,
        .bytes = r->bytes,
        .count_ever = r->count_ever,
        .bytes_ever = r->bytes_ever,
        .uses = r->uses,
        .first = r->first,
        .last = r->last,
        .turn = turn,
        .age = r->count ? (double)(now() - r->since) / 1e9 : 0.0,
        .history = points,
        .points = filled + 1,
    };
    out->site_depth = arena__site_frames(r->site, &out->site);
    out->used_depth = arena__site_frames(r->used, &out->used);
}

size_t arena_escapes(arena_escape_fn fn, void *arg) {
    arena_escape escape;
    arena_point points[POINTS + 1];
    char example[EXAMPLE];
    size_t told = 0;
    arena__audit_drain();
    for (uint32_t number = 1;; number++) {
        arena__sites_lock();
        bool more = map && number <= map->row_count, used = more && map->rows[number].kind;
        if (used) {
            roll(&map->rows[number]);
            fill(&escape, &map->rows[number], points);
            memcpy(example, map->rows[number].example, EXAMPLE);
            escape.example = example;
        }
        arena__sites_unlock();
        if (!more) return told;
        if (!used) continue;
        told++;
        if (fn) fn(&escape, arg); /* not under the lock: it may allocate */
    }
}
