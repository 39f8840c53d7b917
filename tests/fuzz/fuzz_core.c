/* fuzz_core.c: a libFuzzer target over programs of C API calls, built and run by tests/fuzz/run.
 *
 * The input's bytes decode into operations, one after the other; every byte string is a program.
 * Beside the library runs a model of what its contracts promise: which ticks are open and what they
 * hold, what each piece of memory contains, what each counter says. Each call's result is foretold
 * by the model and compared; every difference prints what differed and aborts.
 *
 * The operating system is the fuzzer's own (arena__system): so it counts the mappings, sees what is
 * in them when they go, and the n-th request can be made to fail.
 *
 * The first byte of an input says whether AddressSanitizer is told of each piece: where it is,
 * every tick is strict and no fast path runs, so half of the inputs go without.
 *
 * Secrets: what is written into a tick that shall be wiped has no byte below 0x80, what is written
 * elsewhere none above. So whoever looks at memory that nobody may use any more can tell whether
 * something was left behind there, whatever moved or grew or was forgotten meanwhile.
 *
 * An input leaves nothing behind: at its end all is ended, freed and unpinned, the counters are at
 * their baseline, and enough empty ticks have passed that the cache is empty. So an input that
 * fails fails alone, too. What the debug dial keeps for ever is unmapped then, behind the library's
 * back.
 */
#include "../../csrc/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Hot loops of the model: what they read is the model's own, and their branches say nothing new. */
#define PLAIN __attribute__((no_sanitize("address", "undefined"), no_sanitize("coverage")))

enum {
    MAX_TICKS = 8,   /* open at a time */
    MAX_ENDED = 8,   /* records of ended ticks, to be misused */
    MAX_PIECES = 96, /* whose bytes are watched; when there are more, old scratch is forgotten */
    MAX_HELD = 16,   /* persisted pieces and strays among them: these are never forgotten */
    MAX_STRINGS = 10,
    MAX_PINS = 12, /* pinned chunks */
    MAX_NOTES = 48, /* cleanups */
    MAX_MAPPINGS = 2048,
    MAX_SLABS = 8,
    MAX_NESTING = 3, /* cleanups that run programs inside cleanups */
    EDGE = 192,      /* bytes that are written and watched at a piece's start, and at its end */
    MAX_TEXT = 1500,
    MAX_LENGTH = 192 << 10, /* of a growing string */
    MAX_DIRT = 32,
    BUDGET = 12 << 20 /* bytes an input may ask for in large pieces: else it would be slow */
};
#define ABSURD ((size_t)1 << 30) /* what is larger than this the fuzzer's system refuses */
#define PAGE ((size_t)4096)
#define KEPT (ARENA_DEBUG_NOREUSE | ARENA_DEBUG_GUARD) /* with one of them nothing is reused */

/* ---- The model ------------------------------------------------------------------------------- */

typedef struct note { /* a cleanup that waits */
    struct note *below;
    struct tick *tick;
    unsigned kind, detail;
} note;

typedef struct tick {
    arena_tick *real;
    bool ending, wipe;
    size_t used, limit;
    uint64_t number;
    note *notes; /* the next to run */
} tick;

typedef enum { IN_TICK, STRAY, PERSISTED, IN_ENDED, ORPHAN } place; /* ORPHAN: kept by a pin */

typedef struct piece {
    char *at;
    size_t size;
    place place;
    tick *tick;
    unsigned seed; /* decides its bytes */
} piece;

typedef struct string {
    arena_strbuf *real;
    place place;
    tick *tick;
    size_t len;
    char *copy; /* of its bytes */
    size_t held, blocks; /* persisted only: bytes and allocations that it is counted by */
} string;

typedef struct pin {
    arena__chunk *chunk;
    size_t size, count;
    tick *tick; /* NULL: its tick has ended */
} pin;

static struct {
    tick ticks[MAX_TICKS]; /* the stack of open ones */
    size_t depth;
    arena_tick *ended[MAX_ENDED];
    size_t ended_count;
    piece pieces[MAX_PIECES];
    size_t piece_count, held_pieces;
    string strings[MAX_STRINGS];
    size_t string_count;
    pin pins[MAX_PINS];
    size_t pin_count;
    note notes[MAX_NOTES];
    size_t note_count, nesting;
    unsigned seeds, turn;
    size_t budget;
    size_t large; /* the last large size: a second request for it finds the first one's chunk */
    struct {
        char *at;
        size_t size;
    } dirt[MAX_DIRT]; /* what was written far from a block's start: zeroing must not forget it */
    unsigned dirt_count;
    size_t process_limit; /* SIZE_MAX: none */
    struct {
        int policy;
        size_t most;
    } retain[3]; /* of the process, and of ticks "a" and "b", which have none at the start */
    size_t asked; /* by the call that runs; SIZE_MAX when it may need more than that */
    size_t charged; /* to its tick by the last call that was foretold; SIZE_MAX: to none */
    int debug;      /* flags of the dial */
    bool secrets;   /* were written in this input */
    /* What arena_stats_get must say. Those that count "ever" go on from input to input. */
    arena_stats stats;
} model;

static uint64_t operations;
static const char *running = "(start)"; /* the operation, for messages */
static bool tracing;
/* Without a zero: what is zeroed differs from it. The second one is for secrets. */
static uint8_t noise[2][4096 + MAX_LENGTH + 64];
static char copies[MAX_STRINGS][MAX_LENGTH + 1];

_Noreturn static void mismatch(const char *what, uint64_t expected, uint64_t got) {
    fprintf(stderr, "fuzz: in %s: %s: expected %llu (%lld), got %llu (%lld)\n", running, what,
            (unsigned long long)expected, (long long)expected, (unsigned long long)got,
            (long long)got);
    abort();
}

PLAIN static inline void same(const char *what, uint64_t expected, uint64_t got) {
    if (expected != got) mismatch(what, expected, got);
}

static size_t lesser(size_t a, size_t b) {
    return a < b ? a : b;
}

/* ---- The operating system -------------------------------------------------------------------- */

typedef struct mapping {
    char *start;
    size_t size;
    size_t lead;   /* bytes before the header of a guarded chunk, once it was looked at */
    size_t sealed; /* bytes at its end that fault */
    bool failed;   /* its guard could not be sealed: the library does not count it */
    bool retired;  /* sealed or kept by the debug dial: nobody may touch it any more */
} mapping;

static struct {
    mapping mappings[MAX_MAPPINGS];
    size_t count, bytes;       /* mapped now, and what of it is chunks */
    void *slabs[MAX_SLABS];    /* tick records, for which the library asks once and for all */
    size_t slab_count, slab_size;
    bool for_records;          /* arena_begin is running */
    size_t until, times;       /* the until-th request from now fails, and times - 1 after it */
    size_t smallest;           /* mapping given back since it was set */
    size_t cached;             /* bytes in the library's cache at the last refusal */
    size_t refused;            /* bytes of the last refusal */
    size_t fired;              /* requests refused since the call began */
} os;

static bool os_fails(void) {
    if (!os.until || --os.until) return false;
    if (--os.times) os.until = 1;
    return true;
}

static bool os_refuses(size_t size) {
    if (size > ABSURD) return true; /* by nature: this is not counted as a fault */
    if (!os_fails()) return false;
    os.fired++;
    os.refused = size;
    arena_stats s;
    arena_stats_get(&s);
    os.cached = s.cached;
    return true;
}

static void *os_map(size_t size) {
    if (os_refuses(size)) return NULL;
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) mismatch("the fuzzer has no memory", 0, size);
    if (os.for_records) {
        os.slabs[os.slab_count++] = start;
        os.slab_size = size;
        return start;
    }
    if (os.count == MAX_MAPPINGS) mismatch("too many mappings", MAX_MAPPINGS, os.count + 1);
    os.mappings[os.count++] = (mapping){.start = start, .size = size};
    os.bytes += size;
    model.stats.maps++;
    return start;
}

/* The mapping that these bytes lie in, but not in one that is retired. */
PLAIN static mapping *mapping_over(const char *at, size_t size) {
    for (mapping *m = os.mappings + os.count; m-- > os.mappings;)
        if (at >= m->start && at + size <= m->start + m->size - m->sealed && !m->retired) return m;
    return NULL;
}

/* The mapping that a piece lies in, behind the chunk's header. */
static mapping *mapping_of(const char *at, size_t size) {
    mapping *m = mapping_over(at - ARENA__HEAD, size + ARENA__HEAD);
    if (!m) mismatch("a piece lies in no mapping", 1, 0);
    return m;
}

static mapping *mapping_from(void *start, size_t size) {
    mapping *m = mapping_over(start, 1);
    if (!m) mismatch("no such mapping to give back", 1, 0);
    same("start of a mapping given back", (uintptr_t)m->start, (uintptr_t)start);
    same("size of a mapping given back", m->size, size);
    return m;
}

/* Bytes of a mapping that are a chunk. */
static size_t chunk_bytes(const mapping *m) {
    return m->size - m->lead - m->sealed;
}

/* Nobody uses this memory: no secret is in it. (No check by a sanitizer: it may be shut.) */
PLAIN static void check_no_secrets(const mapping *m) {
    const uint64_t high = 0x8080808080808080u, filled = 0x0101010101010101u * ARENA__FILL;
    if (!model.secrets) return;
    const char *end = m->start + m->size - m->sealed;
    for (const char *at = m->start + m->lead % 16; at + sizeof high <= end; at += sizeof high) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
        if ((word & high) == high && word != filled)
            mismatch("a secret is left in memory that has ended, at", 0, (uint64_t)(at - m->start));
    }
}

static void os_unmap(void *start, size_t size) {
    mapping *m = mapping_from(start, size);
    check_no_secrets(m);
    os.bytes -= chunk_bytes(m);
    os.smallest = lesser(os.smallest, size);
    if (m->failed)
        model.stats.maps--;
    else
        model.stats.unmaps++;
    *m = os.mappings[--os.count];
    if (munmap(start, size)) mismatch("munmap", 0, 1);
}

/* It always moves, so that a pointer to the old place is found out. Asked under the library's lock,
 * and a refusal does no harm: the string is copied instead. */
static void *os_remap(void *start, size_t old_size, size_t size) {
    mapping *m = mapping_from(start, old_size);
    same("flags that forbid to move pages", 0, (uint64_t)(model.debug & KEPT));
    if (size > ABSURD || os_fails()) return NULL;
    void *to = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *moved = mremap(start, old_size, size, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (moved == MAP_FAILED) mismatch("the fuzzer has no memory", 0, size);
    m->start = moved;
    m->size = size;
    os.bytes += size - old_size;
    return moved;
}

/* From here on nobody may touch it: whoever does is stopped by the processor. */
static void retire(mapping *m) {
    check_no_secrets(m);
    os.bytes -= chunk_bytes(m);
    model.stats.retired += m->size;
    m->retired = true;
    if (mprotect(m->start, m->size, PROT_NONE)) mismatch("mprotect", 0, 1);
}

/* The whole of a mapping that has ended, or the last page of one that begins. */
static bool os_seal(void *start, size_t size) {
    mapping *m = mapping_over(start, 1);
    same("flags ask for a seal", true, (model.debug & ARENA_DEBUG_GUARD) != 0);
    if (!m) mismatch("no such mapping to seal", 1, 0);
    bool whole = start == m->start && size == m->size;
    if (os_fails()) {
        os.fired += 2; /* no cache can help here */
        m->failed = !whole;
        return false;
    }
    if (whole) {
        retire(m);
        return true;
    }
    same("the guard is the last page", (uintptr_t)(m->start + m->size - PAGE), (uintptr_t)start);
    same("size of the guard", PAGE, size);
    m->sealed = size;
    os.bytes -= size;
    return mprotect(start, size, PROT_NONE) == 0;
}

static void *os_resize(void *old, size_t size) {
    return os_refuses(size) ? NULL : realloc(old, size);
}

/* As in a thread that has begun no tick yet. What is spare in the old slab stays so. */
static void forget_records(void) {
    if (os.slab_count < MAX_SLABS) arena__self.free = NULL;
}

/* No tick is open: not even the records stay, so that the next input asks for them again. */
static void unmap_records(void) {
    arena__self.free = NULL;
    while (os.slab_count)
        if (munmap(os.slabs[--os.slab_count], os.slab_size)) mismatch("munmap", 0, 1);
}

/* Really unmaps what is retired. */
static void purge(void) {
    for (size_t i = os.count; i-- > 0;) {
        mapping *m = &os.mappings[i];
        if (!m->retired) continue;
        arena__check_open(m->start, m->size);
        if (munmap(m->start, m->size)) mismatch("munmap", 0, 1);
        *m = os.mappings[--os.count];
    }
}

/* ---- The model: limits and counters ---------------------------------------------------------- */

/* What counts against the tick's limit. */
static size_t model_held(const tick *t) {
    size_t held = 0;
    for (; t < model.ticks + model.depth; t++) held += t->used;
    return held;
}

PLAIN static size_t model_scratch(void) {
    size_t sum = 0;
    for (size_t i = 0; i < model.depth; i++) sum += model.ticks[i].used;
    return sum;
}

static size_t process_held(void) {
    return model_scratch() + model.stats.persisted + model.stats.strays;
}

static int model_may_hold(size_t size) {
    if (model.process_limit == SIZE_MAX || size <= model.process_limit - process_held())
        return ARENA_OK;
    return ARENA_E_LIMIT;
}

/* May the tick be charged `size` more bytes? */
static int model_may_charge(const tick *t, size_t size) {
    if (t->ending) return ARENA_E_ENDING;
    if (size > t->limit - model_held(t))
        return t->limit < ARENA__UNLIMITED ? ARENA_E_LIMIT : ARENA_E_NOMEM;
    for (const tick *outer = model.ticks; outer < t; outer++) {
        if (outer->ending || outer->limit == ARENA__UNLIMITED) continue;
        if (size > outer->limit - model_held(outer)) return ARENA_E_LIMIT;
    }
    return model_may_hold(size);
}

/* The most that may be asked for there; t may be NULL. */
static size_t model_room(const tick *t) {
    size_t room = ARENA__UNLIMITED;
    if (model.process_limit != SIZE_MAX) room = model.process_limit - process_held();
    for (const tick *outer = model.ticks; t && outer <= t; outer++)
        if (!outer->ending) room = lesser(room, outer->limit - model_held(outer));
    return room;
}

static void note_persisted_peak(void) {
    if (model.stats.persisted > model.stats.persisted_peak)
        model.stats.persisted_peak = model.stats.persisted;
}

/* Counts bytes and allocations; both may be negative. */
static void model_charge(place where, tick *t, size_t size, size_t blocks) {
    if (where == IN_TICK) {
        t->used += size;
    } else if (where == STRAY) {
        model.stats.strays += size;
        model.stats.strays_count += blocks;
        if (blocks < MAX_PIECES) model.stats.strays_ever += blocks;
    } else {
        model.stats.persisted += size;
        model.stats.persisted_count += blocks;
        note_persisted_peak();
    }
}

/* Is the memory in the hands of an open tick or of a pin? Else it is cached, or was retired. */
static bool is_live(const mapping *m) {
    for (size_t i = 0; i < model.pin_count; i++)
        if (mapping_over((char *)model.pins[i].chunk, 1) == m) return true;
    for (size_t i = 0; i < model.depth; i++)
        for (const arena__chunk *c = model.ticks[i].real->chunks; c; c = c->next)
            if (mapping_over((const char *)c, 1) == m) return true;
    return false;
}

/* Of what ARENA_DEBUG_NOREUSE keeps the system is not told. Nothing is cached while that is on. */
static void find_retired(uint64_t retired) {
    if (retired != model.stats.retired)
        for (mapping *m = os.mappings; m < os.mappings + os.count; m++)
            if (!m->retired && !is_live(m)) retire(m);
    same("retired", model.stats.retired, retired);
    if (os.count > MAX_MAPPINGS / 2) purge();
}

PLAIN static void check_stats(void) {
    arena_stats s;
    const arena_stats *m = &model.stats;
    arena_stats_get(&s);
    find_retired(s.retired);
    size_t scratch = model_scratch(), peak = m->scratch_peak;
    for (size_t i = 0; i < model.depth; i++) {
        const tick *t = &model.ticks[i];
        same("arena_used", t->used, arena_used(t->real));
        if (t->used > peak) peak = t->used;
    }
    same("ticks_begun", m->ticks_begun, s.ticks_begun);
    same("ticks_ended", m->ticks_ended, s.ticks_ended);
    same("ticks_open", model.depth, s.ticks_open);
    same("scratch", scratch, s.scratch);
    same("scratch_peak", peak, s.scratch_peak);
    same("chunks + cached + pinned", os.bytes, s.chunks + s.cached + s.pinned);
    same("chunks hold the scratch", true, s.chunks >= scratch);
    same("chunks_peak is a peak", true, s.chunks_peak >= s.chunks);
    same("pinned", m->pinned, s.pinned);
    same("pinned_count", m->pinned_count, s.pinned_count);
    same("pinned_ever", m->pinned_ever, s.pinned_ever);
    same("persisted", m->persisted, s.persisted);
    same("persisted_count", m->persisted_count, s.persisted_count);
    same("persisted_peak", m->persisted_peak, s.persisted_peak);
    same("strays", m->strays, s.strays);
    same("strays_count", m->strays_count, s.strays_count);
    same("strays_ever", m->strays_ever, s.strays_ever);
    same("maps", m->maps, s.maps);
    same("unmaps", m->unmaps, s.unmaps);
    same("limit", model.process_limit == SIZE_MAX ? UINT64_MAX : model.process_limit, s.limit);
    if (model.debug & KEPT) same("cached though nothing is reused", 0, s.cached);
    if (!model.depth) same("chunks without a tick", 0, s.chunks);
    same("arena_current", model.depth ? (uintptr_t)model.ticks[model.depth - 1].real : 0,
         (uintptr_t)arena_current());
}

/* ---- The model: contents --------------------------------------------------------------------- */

static const uint8_t *noise_at(unsigned seed) {
    return noise[seed % 2] + seed / 2 * 7 % 4096;
}

static unsigned other_end(unsigned seed) { /* for a piece's last bytes */
    return seed + 198;
}

/* For bytes that go to the tick, or to none. */
static unsigned new_seed(const tick *t) {
    bool secret = t && t->wipe;
    model.secrets |= secret;
    return ++model.seeds * 2 + secret;
}

static void note_dirt(char *at, size_t size) {
    unsigned i = model.dirt_count++ % MAX_DIRT;
    model.dirt[i].at = at;
    model.dirt[i].size = size;
}

/* A piece's first and last bytes are written; what lies between in a large one is left alone. */
static void fill(piece *p) {
    p->seed = new_seed(p->tick);
    size_t head = lesser(p->size, EDGE), tail = lesser(p->size - head, EDGE);
    memcpy(p->at, noise_at(p->seed), head);
    memcpy(p->at + p->size - tail, noise_at(other_end(p->seed)), tail);
    if (tail == EDGE) note_dirt(p->at + p->size - tail, tail);
}

/* Are the first `size` bytes of the piece still what fill wrote? */
static void check_piece_to(const piece *p, size_t size) {
    size_t head = lesser(p->size, EDGE), tail = lesser(p->size - head, EDGE);
    if (memcmp(p->at, noise_at(p->seed), lesser(head, size)))
        mismatch("first bytes of a piece changed; its size", p->size, size);
    if (size == p->size && memcmp(p->at + size - tail, noise_at(other_end(p->seed)), tail))
        mismatch("last bytes of a piece changed; its size", p->size, size);
}

static void check_piece(const piece *p) {
    check_piece_to(p, p->size);
}

static void check_string(const string *s, bool all) {
    size_t from = all || s->len < EDGE ? 0 : s->len - EDGE;
    const char *data = arena_strbuf_data(s->real);
    same("length of a string", s->len, arena_strbuf_len(s->real));
    same("NUL of a string", 0, (uint64_t)data[s->len]);
    if (memcmp(data, s->copy, lesser(s->len, EDGE))
        || memcmp(data + from, s->copy + from, s->len - from))
        mismatch("bytes of a string changed; its length", s->len, s->len);
    if (s->place != IN_TICK && s->real->data)
        same("room for a string", true, arena_size_persist(data) > s->len);
}

static void check_contents(const tick *t) { /* NULL: of all that lives */
    for (size_t i = 0; i < model.piece_count; i++)
        if (!t || model.pieces[i].tick == t) check_piece(&model.pieces[i]);
    for (size_t i = 0; i < model.string_count; i++)
        if (!t || model.strings[i].tick == t) check_string(&model.strings[i], true);
}

static void check_sample(void) {
    model.turn++;
    if (model.piece_count) check_piece(&model.pieces[model.turn % model.piece_count]);
    if (model.string_count) check_string(&model.strings[model.turn % model.string_count], false);
}

PLAIN static bool apart(const char *at, size_t size, const void *other, size_t other_size) {
    return at + size <= (const char *)other || (const char *)other + other_size <= at;
}

/* Every word up to 64 KiB; of larger ones the ends, four words in each page, and
 * what was written of late. */
PLAIN static void check_zero(const char *at, size_t size) {
    const size_t all = 64 << 10;
    size_t i = 0;
    for (uint64_t word; i + sizeof word <= size;) {
        memcpy(&word, at + i, sizeof word);
        if (word) mismatch("zeroed memory has a word that is not zero, at", 0, i);
        i += i < all || i + 8192 > size || i % 4096 < 32 ? sizeof word : 4096 - i % 4096;
    }
    for (; i < size; i++)
        if (at[i]) mismatch("zeroed memory has a byte that is not zero, at", 0, i);
    for (i = 0; i < MAX_DIRT; i++) {
        if (apart(at, size, model.dirt[i].at, model.dirt[i].size)) continue;
        const char *dirt = model.dirt[i].at;
        for (const char *end = dirt + model.dirt[i].size; dirt < end; dirt++)
            if (dirt >= at && dirt < at + size && *dirt)
                mismatch("zeroed memory has an old byte, at", 0, (uint64_t)(dirt - at));
    }
}

/* No live piece or string overlaps these bytes, but for `self`, whose they are. */
PLAIN static void check_apart(const char *at, size_t size, const void *self) {
    if (!size) size = 1;
    for (const piece *p = model.pieces; p < model.pieces + model.piece_count; p++)
        if (p != self && !apart(at, size, p->at, p->size + !p->size))
            mismatch("two pieces overlap; sizes", p->size, size);
    for (const string *s = model.strings; s < model.strings + model.string_count; s++) {
        if (!apart(at, size, s->real, sizeof *s->real))
            mismatch("a piece overlaps a string's record; size", 0, size);
        if (s != self && s->real->data && !apart(at, size, s->real->data, s->real->cap + 1))
            mismatch("a piece overlaps a string; sizes", s->real->cap, size);
    }
}

/* A guarded chunk ends where its guard begins. */
static arena__chunk *chunk_in(mapping *m, const char *at) {
    if (!m->sealed) return (arena__chunk *)(void *)m->start;
    if (!m->lead) {
        m->lead = (size_t)(at - ARENA__HEAD - m->start);
        os.bytes -= m->lead;
    }
    arena__chunk *chunk = (arena__chunk *)(void *)(m->start + m->lead);
    same("a guarded chunk has one block", (uintptr_t)chunk + ARENA__HEAD, (uintptr_t)at);
    same("end of a guarded chunk", (uintptr_t)(m->start + m->size - PAGE),
         (uintptr_t)chunk + chunk->size);
    return chunk;
}

static void check_block(place where, const char *at, size_t size, const void *self) {
    same("alignment", 0, (uintptr_t)at % ARENA__ALIGN);
    if (where == IN_TICK) (void)chunk_in(mapping_of(at, size), at);
    check_apart(at, size, self);
}

static size_t span(size_t size) {
    return size ? (size + 15) / 16 * 16 : 16;
}

/* A new block: under the dial's GUARD the byte behind it is in a page that faults. */
static void check_guard(place where, const char *at, size_t size) {
    if (where != IN_TICK || !(model.debug & ARENA_DEBUG_GUARD)) return;
    const mapping *m = mapping_of(at, size);
    if (m->size <= ARENA__CHUNK_MAX) return;
    same("a guard lies behind an oversize block", PAGE, m->sealed);
    same("end of a guarded block", (uintptr_t)(m->start + m->size - PAGE),
         (uintptr_t)at + span(size));
}

static bool tick_holds(const tick *t, const arena__chunk *chunk) {
    bool found = false;
    for (const arena__chunk *c = t->real->chunks; c; c = c->next) {
        if (c->next) same("links of the tick's chunks", (uintptr_t)c, (uintptr_t)c->next->prev);
        found |= c == chunk;
    }
    return found;
}

static pin *pin_over(const char *at) {
    for (size_t i = 0; i < model.pin_count; i++)
        if (!apart(at, 1, model.pins[i].chunk, model.pins[i].size)) return &model.pins[i];
    return NULL;
}

/* ---- The model: what lives ------------------------------------------------------------------- */

static void forget_piece(piece *p) {
    if (p->place == STRAY || p->place == PERSISTED) model.held_pieces--;
    *p = model.pieces[--model.piece_count];
}

static void free_piece(piece *p) {
    check_piece(p);
    arena_free_persist(p->at);
    model_charge(p->place, NULL, -p->size, (size_t)-1);
    forget_piece(p);
}

static void free_string(string *s) {
    check_string(s, true);
    arena_free_persist(s->real);
    model_charge(s->place, NULL, -s->held, -s->blocks);
}

static void forget_string(string *s) { /* the copy's memory goes to the free end of the table */
    char *copy = s->copy;
    *s = model.strings[--model.string_count];
    model.strings[model.string_count].copy = copy;
}

/* There is room in the tables for one more of each. */
static void make_room(void) {
    if (model.held_pieces == MAX_HELD)
        for (piece *p = model.pieces;; p++)
            if (p->place == STRAY || p->place == PERSISTED) {
                free_piece(p);
                break;
            }
    if (model.piece_count == MAX_PIECES) {
        piece *p = &model.pieces[model.seeds % MAX_PIECES];
        while (p->place == STRAY || p->place == PERSISTED)
            p = p == model.pieces ? &model.pieces[MAX_PIECES - 1] : p - 1;
        forget_piece(p);
    }
    if (model.string_count == MAX_STRINGS) {
        string *s = &model.strings[model.seeds % MAX_STRINGS];
        if (s->place != IN_TICK) free_string(s);
        forget_string(s);
    }
}

/* A new block of memory from a call: it is checked, counted, filled and watched from now on. */
static piece *adopt(place where, tick *t, char *at, size_t size) {
    check_block(where, at, size, NULL);
    check_guard(where, at, size);
    if (where != IN_TICK) same("arena_size_persist", size, arena_size_persist(at));
    model_charge(where, t, size, 1);
    if (where != IN_TICK) model.held_pieces++;
    piece *p = &model.pieces[model.piece_count++];
    *p = (piece){at, size, where, t, 0};
    fill(p);
    return p;
}

PLAIN static void check_all_bytes(const piece *p, int value) {
    for (size_t i = 0; i < p->size; i++)
        same("a byte of ended memory", (uint64_t)value, (uint8_t)p->at[i]);
}

/* A piece of a tick that has just ended, and that no pin keeps. */
static void check_ended(const tick *t, const piece *p) {
    const mapping *m = mapping_over(p->at, p->size);
    if (model.debug & ARENA_DEBUG_GUARD) same("ended memory can be touched", false, m != NULL);
    if ((model.debug & KEPT) == ARENA_DEBUG_NOREUSE)
        same("ended memory stays readable", true, m != NULL);
    if (!m) return;
    if (t->wipe)
        check_all_bytes(p, 0);
    else if (model.debug & ARENA_DEBUG_FILL)
        check_all_bytes(p, ARENA__FILL);
}

/* Secrets of a tick that has just ended are in no memory that is cached, or will be retired. */
static void check_wiped(void) {
    for (const mapping *m = os.mappings; m < os.mappings + os.count; m++)
        if (!m->retired && !is_live(m)) check_no_secrets(m);
}

/* The innermost tick has ended. Nothing has been asked for since. */
static void model_close(void) {
    tick *t = &model.ticks[--model.depth];
    if (t->notes) mismatch("cleanups that did not run", 0, 1);
    for (size_t i = 0; i < model.pin_count; i++) {
        pin *p = &model.pins[i];
        if (p->tick != t) continue;
        p->tick = NULL;
        model.stats.pinned += p->size;
        model.stats.pinned_count++;
        model.stats.pinned_ever++;
    }
    for (size_t i = model.piece_count; i-- > 0;) {
        piece *p = &model.pieces[i];
        if (p->tick != t) continue;
        if (pin_over(p->at))
            p->place = ORPHAN, p->tick = NULL;
        else
            check_ended(t, p), forget_piece(p);
    }
    if (t->wipe) check_wiped();
    for (size_t i = model.string_count; i-- > 0;)
        if (model.strings[i].tick == t) forget_string(&model.strings[i]);
    if (t->used > model.stats.scratch_peak) model.stats.scratch_peak = t->used;
    model.stats.ticks_ended++;
    memmove(model.ended + 1, model.ended, sizeof model.ended - sizeof *model.ended);
    model.ended[0] = t->real;
    if (model.ended_count < MAX_ENDED) model.ended_count++;
}

/* ---- The input ------------------------------------------------------------------------------- */

static const uint8_t *in, *in_end;

static unsigned byte(void) {
    return in < in_end ? *in++ : 0;
}

typedef struct target {
    place place;
    tick *tick;
    arena_tick *arg; /* what the call is given */
} target;

static target pick_current(void) {
    if (!model.depth) return (target){STRAY, NULL, NULL};
    return (target){IN_TICK, &model.ticks[model.depth - 1], NULL};
}

/* Where a call shall go: to the current tick or to a stray, to any open tick, to an ended one. */
static target pick_tick(void) {
    unsigned b = byte(), which = b / 16;
    if (b % 16 == 15 && model.ended_count)
        return (target){IN_ENDED, NULL, model.ended[which % model.ended_count]};
    if (b % 16 < 7 || !model.depth) return pick_current();
    tick *t = &model.ticks[which % model.depth];
    return (target){IN_TICK, t, t->real};
}

/* ... or to the `_persist` twin. */
static target pick_target(void) {
    if (in < in_end && *in % 16 >= 12 && *in % 16 < 15) {
        in++;
        return (target){PERSISTED, NULL, NULL};
    }
    return pick_tick();
}

static size_t pick_size(const tick *t) {
    static const size_t absurd[] = {SIZE_MAX,         SIZE_MAX - 15,    SIZE_MAX / 2,
                                    SIZE_MAX / 4,     SIZE_MAX / 4 + 1, SIZE_MAX / 4 - 1,
                                    SIZE_MAX - 4096,  SIZE_MAX / 8};
    unsigned kind = byte(), detail = byte();
    size_t size;
    if (kind < 96) {
        size = kind % 2 ? detail : detail % 34;
    } else if (kind < 180) { /* around a border of 16 */
        size = (size_t)16 * (kind - 95) * (1 + detail / 8 % 16) + detail % 3 - 1;
    } else if (kind < 220) { /* around a chunk, or a quarter of one, with or without its header */
        size = ARENA__CHUNK_MIN << detail % ARENA__CLASSES;
        if (detail & 8) size /= 4;
        if (detail & 16) size -= ARENA__HEAD;
        if (detail & 32) size -= size / 2;
        size += kind - 200;
    } else if (kind < 240) { /* around what the limit still allows, or a large size once more */
        size_t room = model_room(t);
        size = (room < 4096 ? room : model.large + detail % 8 * 16) + kind % 4 - 2;
        if (size > ABSURD) size = 0;
    } else if (kind < 244) { /* oversize */
        size = ARENA__CHUNK_MAX + (size_t)detail * 5000;
    } else {
        return absurd[detail % 8] - (kind % 2 && detail % 8 > 1 ? detail : 0);
    }
    if (size > 20000) {
        if (size > model.budget) return size % 2048;
        model.budget -= size;
        model.large = size;
    }
    return size;
}

/* ---- Operations: scratch and persisted pieces ------------------------------------------------ */

/* What a call that asks for `size` bytes there must answer. */
static int foretell(target to, size_t size) {
    os.fired = 0;
    model.asked = model.charged = to.place == IN_TICK ? size : SIZE_MAX;
    if (to.place == IN_ENDED) return ARENA_E_ENDED;
    int code = to.place == IN_TICK ? model_may_charge(to.tick, size) : model_may_hold(size);
    return code == ARENA_OK && size > ABSURD ? ARENA_E_NOMEM : code;
}

/* May the call fail because requests were refused? Not where that was one, and the library had
 * cached chunks to give back before it asked again; nor where it was a large chunk for a small
 * piece, which a small chunk holds as well. */
static bool excused(void) {
    if (os.fired != 1) return os.fired > 1;
    return !os.cached && (os.refused <= ARENA__CHUNK_MIN || model.asked > 4096);
}

/* Compares; true when the call succeeded. */
static bool settle(int expected, int got) {
    /* So near to SIZE_MAX / 4 it depends on the ticks around which of the two is seen first. */
    bool near = model.charged <= ARENA__UNLIMITED && model.charged > ARENA__UNLIMITED - ABSURD;
    bool either = near && ((expected == ARENA_E_LIMIT && got == ARENA_E_NOMEM) ||
                           (expected == ARENA_E_NOMEM && got == ARENA_E_LIMIT));
    /* A persisted string asks twice: its record may be refused before its bytes pass a limit. */
    bool reached = expected == ARENA_OK || (expected == ARENA_E_LIMIT && model.asked == SIZE_MAX);
    bool failed = reached && got == ARENA_E_NOMEM && excused();
    if (got != expected && !either && !failed)
        mismatch("result of the call", (uint64_t)expected, (uint64_t)got);
    if (got != ARENA_OK) same("arena_error", (uint64_t)got, (uint64_t)arena_error());
    return got == ARENA_OK;
}

static bool settle_pointer(int expected, const void *got) {
    return settle(expected, got ? ARENA_OK : arena_error());
}

static void op_alloc(void) {
    target to = pick_target();
    size_t size = pick_size(to.tick);
    int expected = foretell(to, size);
    char *at = to.place == PERSISTED ? arena_alloc_persist(size) : arena_alloc(to.arg, size);
    if (settle_pointer(expected, at)) adopt(to.place, to.tick, at, size);
}

static void op_zalloc(void) {
    target to = pick_target();
    size_t size = pick_size(to.tick);
    int expected = foretell(to, size);
    char *at = to.place == PERSISTED ? arena_zalloc_persist(size) : arena_zalloc(to.arg, size);
    if (!settle_pointer(expected, at)) return;
    check_zero(at, size);
    adopt(to.place, to.tick, at, size);
}

/* Given a copy of `text`'s first `size` bytes, and a NUL where `nul`. */
static void adopt_copy(target to, char *at, const void *text, size_t size, bool nul) {
    if (memcmp(at, text, size)) mismatch("the copy differs; size", size, size);
    if (nul) same("NUL of the copy", 0, (uint64_t)at[size]);
    adopt(to.place, to.tick, at, size + nul);
}

/* Text from the noise, of `size` bytes and a NUL. */
static char *pick_text(const tick *t, size_t size) {
    static char text[MAX_TEXT + 1];
    memcpy(text, noise_at(new_seed(t)), size);
    text[size] = '\0';
    return text;
}

static size_t pick_length(const tick *t) {
    return pick_size(t) % (MAX_TEXT + 1);
}

static void op_memdup(void) {
    target to = pick_target();
    size_t size = pick_size(to.tick);
    if (size <= ABSURD) size = lesser(size, MAX_LENGTH);
    const void *data = noise_at(new_seed(to.tick));
    int expected = foretell(to, size);
    char *at = to.place == PERSISTED ? arena_memdup_persist(data, size)
                                     : arena_memdup(to.arg, data, size);
    if (settle_pointer(expected, at)) adopt_copy(to, at, data, size, false);
}

static void op_strdup(void) {
    target to = pick_target();
    size_t size = pick_length(to.tick);
    const char *text = pick_text(to.tick, size);
    int expected = foretell(to, size + 1);
    char *at = to.place == PERSISTED ? arena_strdup_persist(text) : arena_strdup(to.arg, text);
    if (settle_pointer(expected, at)) adopt_copy(to, at, text, size, true);
}

static void op_strndup(void) {
    target to = pick_target();
    size_t size = pick_length(to.tick), most = pick_size(to.tick);
    const char *text = pick_text(to.tick, size);
    size = lesser(size, most);
    int expected = foretell(to, size + 1);
    char *at = to.place == PERSISTED ? arena_strndup_persist(text, most)
                                     : arena_strndup(to.arg, text, most);
    if (settle_pointer(expected, at)) adopt_copy(to, at, text, size, true);
}

static void op_printf(void) {
    target to = pick_target();
    int length = (int)pick_length(to.tick), number = (int)new_seed(to.tick);
    const char *text = (const char *)noise_at((unsigned)number);
    char wanted[MAX_TEXT + 32];
    size_t size = (size_t)snprintf(wanted, sizeof wanted, "%.*s:%d", length, text, number);
    int expected = foretell(to, size + 1);
    char *at = to.place == PERSISTED ? arena_printf_persist("%.*s:%d", length, text, number)
                                     : arena_printf(to.arg, "%.*s:%d", length, text, number);
    if (settle_pointer(expected, at)) adopt_copy(to, at, wanted, size, true);
}

static piece *pick_piece(bool scratch) {
    size_t start = byte();
    for (size_t i = 0; i < model.piece_count; i++) {
        piece *p = &model.pieces[(start + i) % model.piece_count];
        if (p->place != ORPHAN && (p->place == IN_TICK) == scratch) return p;
    }
    return NULL;
}

/* The block at `old` is now at `at`, with a new size; its charge is already changed. */
static void move_piece(piece *p, char *at, size_t size) {
    size_t old_size = p->size;
    p->at = at;
    check_piece_to(p, lesser(old_size, size));
    p->size = size;
    check_block(p->place, at, size, p);
    fill(p);
}

static void realloc_in_tick(piece *p, size_t size) {
    tick *t = p->tick;
    bool grows = size > p->size;
    /* A pin promises that the bytes stay; to move its piece away is the pinner's mistake. */
    if (pin_over(p->at)) return;
    target to = {IN_TICK, t, byte() % 2 && t == &model.ticks[model.depth - 1] ? NULL : t->real};
    arena__chunk *chunk = chunk_in(mapping_of(p->at, p->size), p->at);
    bool alone = chunk->alone && p->size > ARENA__CHUNK_MIN / 4;
    bool in_place = p->at + span(p->size) == t->real->pos && size <= (size_t)(t->real->end - p->at);
    int expected = foretell(to, grows ? size - p->size : 0);
    if (expected == ARENA_OK && size > ABSURD) expected = ARENA_E_NOMEM;
    model.asked = size;
    char *at = arena_realloc(to.arg, p->at, p->size, size);
    if (!settle_pointer(expected, at)) {
        check_piece(p);
        return;
    }
    if (!grows || in_place)
        same("a piece that can stay where it is", (uintptr_t)p->at, (uintptr_t)at);
    if (at != p->at && alone) same("an outgrown chunk is still held", false, tick_holds(t, chunk));
    t->used += size - p->size;
    move_piece(p, at, size);
}

static void op_realloc(void) {
    piece *p = pick_piece(true);
    size_t size = pick_size(p ? p->tick : NULL);
    if (p) {
        if (size % 3 == 2 && size < 2048 && p->size < MAX_LENGTH) /* some more */
            size = p->size + size * (1 + p->size / 4096);
        realloc_in_tick(p, size);
        return;
    }
    /* Nothing to grow: NULL as the old block, or, where this makes a stray, somebody's block. */
    target to = pick_current();
    p = to.place == STRAY ? pick_piece(false) : NULL;
    int expected = foretell(to, size);
    char *at = arena_realloc(NULL, p ? p->at : NULL, p ? p->size : 0, size);
    if (!settle_pointer(expected, at)) return;
    if (p) {
        piece copy = *p;
        copy.at = at;
        check_piece_to(&copy, lesser(p->size, size));
    }
    adopt(STRAY == to.place ? STRAY : IN_TICK, to.tick, at, size);
}

static void op_realloc_persist(void) {
    piece *p = pick_piece(false);
    size_t size = pick_size(NULL);
    target to = {p ? p->place : PERSISTED, NULL, NULL};
    int expected = foretell(to, !p ? size : size > p->size ? size - p->size : 0);
    if (expected == ARENA_OK && size > ABSURD) expected = ARENA_E_NOMEM;
    char *at = arena_realloc_persist(p ? p->at : NULL, size);
    if (!settle_pointer(expected, at)) {
        if (p) check_piece(p);
        return;
    }
    if (!p) {
        adopt(PERSISTED, NULL, at, size);
        return;
    }
    model_charge(p->place, NULL, size - p->size, 0);
    move_piece(p, at, size);
    same("arena_size_persist", size, arena_size_persist(at));
}

static void op_free_persist(void) {
    piece *p = pick_piece(false);
    if (p)
        free_piece(p);
    else
        arena_free_persist(NULL);
}

/* ---- Operations: growing strings ------------------------------------------------------------- */

static string *pick_string(void) {
    unsigned b = byte();
    return model.string_count ? &model.strings[b % model.string_count] : NULL;
}

/* Counts what a persisted string holds, which the growth policy decides and not the caller. */
static void recount(string *s) {
    if (s->place == IN_TICK) return;
    size_t held = sizeof *s->real + arena_size_persist(s->real->data);
    size_t blocks = s->real->data ? 2 : 1;
    model_charge(s->place, NULL, held - s->held, blocks - s->blocks);
    s->held = held;
    s->blocks = blocks;
}

/* The capacity is charged to no tick; a persisted string is counted by it. */
static int foretell_string(target to, size_t capacity) {
    size_t record = sizeof(arena_strbuf);
    bool counted = to.place == STRAY || to.place == PERSISTED;
    int expected = foretell(to, counted ? record : 0);
    model.asked = SIZE_MAX;
    if (expected == ARENA_OK && capacity > ARENA__UNLIMITED) expected = ARENA_E_NOMEM;
    if (expected == ARENA_OK && counted && capacity)
        expected = model_may_hold(record + capacity + 1);
    return expected == ARENA_OK && capacity > ABSURD ? ARENA_E_NOMEM : expected;
}

static void op_strbuf_new(void) {
    target to = pick_target();
    size_t capacity = pick_size(to.tick);
    int expected = foretell_string(to, capacity);
    arena_strbuf *real = to.place == PERSISTED ? arena_strbuf_new_persist(capacity)
                                               : arena_strbuf_new(to.arg, capacity);
    if (!settle_pointer(expected, real)) {
        /* Of a persisted string the record may have been there for a moment. */
        arena_stats s;
        arena_stats_get(&s);
        size_t most = model.stats.persisted + sizeof *real;
        if (to.place == PERSISTED && s.persisted_peak <= most)
            model.stats.persisted_peak = s.persisted_peak;
        if (to.place == STRAY && s.strays_ever == model.stats.strays_ever + 1)
            model.stats.strays_ever++;
        return;
    }
    check_block(to.place, (char *)real, sizeof *real, NULL);
    string *s = &model.strings[model.string_count++];
    char *copy = s->copy;
    *s = (string){real, to.place, to.tick, 0, copy, 0, 0};
    if (real->data) check_block(to.place, real->data, capacity + 1, s);
    if (real->data) check_guard(to.place, real->data, real->cap + 1);
    recount(s);
    check_string(s, true);
}

/* A call that adds `size` bytes: how the model sees it before. A persisted string is counted by its
 * capacity; where what the policy wants to have is too much, it is content with what it needs. */
static int foretell_growth(const string *s, size_t size) {
    target to = {s->place, s->tick, NULL};
    const arena_strbuf *real = s->real;
    if (size > ARENA__UNLIMITED - s->len && s->place != IN_TICK) size = SIZE_MAX;
    bool fits = real->data && size <= real->cap - s->len;
    size_t more = s->len + size + 1 - arena_size_persist(s->place == IN_TICK ? NULL : real->data);
    int expected = foretell(to, s->place == IN_TICK || size == SIZE_MAX ? size : fits ? 0 : more);
    model.asked = SIZE_MAX; /* capacity too */
    return size == SIZE_MAX && s->place != IN_TICK ? ARENA_E_NOMEM : expected;
}

/* Of the capacity alone no tick is charged. */
static int foretell_reserve(const string *s, size_t size) {
    if (s->place != IN_TICK) return foretell_growth(s, size);
    os.fired = 0;
    model.asked = SIZE_MAX;
    return size > ABSURD ? ARENA_E_NOMEM : ARENA_OK;
}

/* ... and after. `data` are the bytes, but not where they lie inside the string: that has moved. */
static void settle_growth(string *s, int expected, int got, const void *data, size_t size,
                          arena__chunk *chunk, bool alone) {
    if (settle(expected, got)) {
        memcpy(s->copy + s->len, data, size);
        s->len += size;
        if (s->place == IN_TICK) s->tick->used += size;
        if (s->len > 4096) note_dirt(s->real->data + s->len - EDGE, EDGE);
    }
    recount(s);
    check_string(s, got != ARENA_OK || size > EDGE);
    if (s->real->data) check_block(s->place, s->real->data, s->real->cap + 1, s);
    if (s->real->chunk != chunk) check_guard(s->place, s->real->data, s->real->cap + 1);
    if (alone && s->real->chunk != chunk)
        same("an outgrown chunk is still held", false, tick_holds(s->tick, chunk));
}

/* How a call grows the string. */
enum { APPEND, PUTS, PRINTF, APPEND_SELF, PUTS_SELF, RESERVE };

static void grow_string(int how) {
    string *s = pick_string();
    size_t size = pick_size(s ? s->tick : NULL);
    if (!s) return;
    size_t room = MAX_LENGTH - s->len;
    if (size % 4 == 3 && size < 256 && s->real->cap < (16 << 20)) /* around its capacity */
        size = s->real->cap - s->len + size / 4 - 8;
    if (size > SIZE_MAX - 9) size = 0;
    if (how == PUTS || how == PRINTF) size %= MAX_TEXT + 1 - 16;
    const char *data = how == PUTS ? pick_text(s->tick, size)
                                   : (const char *)noise_at(new_seed(s->tick));
    const char *self = NULL;
    if (how == APPEND_SELF || how == PUTS_SELF) {
        size_t from = s->len ? size % (s->len + 1) : 0;
        self = arena_strbuf_data(s->real) + from;
        data = s->copy + from;
        size = s->len - from;
        if (how == APPEND_SELF) size = lesser(byte() * (1 + s->len / 128), size);
    }
    if (how != RESERVE && (how != APPEND || size <= ABSURD) && size > room) return;
    /* It is for its callers to ask whether the tick takes more work. */
    if (how == RESERVE && s->place == IN_TICK && s->tick->ending) return;
    bool alone = s->place == IN_TICK && s->real->data && s->real->chunk->alone;
    arena__chunk *chunk = s->real->chunk;
    int got, expected = how == RESERVE ? foretell_reserve(s, size) : foretell_growth(s, size);
    switch (how) {
    case APPEND: got = arena_strbuf_append(s->real, data, size); break;
    case PUTS: got = arena_strbuf_puts(s->real, data); break;
    case APPEND_SELF: got = arena_strbuf_append(s->real, self, size); break;
    case PUTS_SELF: got = arena_strbuf_puts(s->real, self); break;
    case PRINTF: got = arena_strbuf_printf(s->real, "%.*s", (int)size, data); break;
    default: got = arena__strbuf_grow(s->real, size), size = got == ARENA_OK ? 0 : size; break;
    }
    settle_growth(s, expected, got, data, size, chunk, alone);
}

static void op_strbuf_append(void) {
    grow_string(APPEND);
}
static void op_strbuf_puts(void) {
    grow_string(PUTS);
}
static void op_strbuf_printf(void) {
    grow_string(PRINTF);
}
static void op_strbuf_append_self(void) {
    grow_string(APPEND_SELF);
}
static void op_strbuf_puts_self(void) {
    grow_string(PUTS_SELF);
}
static void op_strbuf_reserve(void) {
    grow_string(RESERVE);
}

static void op_strbuf_truncate(void) {
    string *s = pick_string();
    size_t size = pick_size(s ? s->tick : NULL);
    if (!s) return;
    if (size % 4 && size <= ABSURD) size %= s->len + 1;
    int expected = s->place == IN_TICK && s->tick->ending ? ARENA_E_ENDING : ARENA_OK;
    if (size > s->len) expected = ARENA_E_INVALID;
    model.asked = os.fired = 0;
    bool clear = size == 0 && model.turn % 2;
    int got = clear ? arena_strbuf_clear(s->real) : arena_strbuf_truncate(s->real, size);
    if (settle(expected, got)) {
        if (s->place == IN_TICK) s->tick->used -= s->len - size;
        s->len = size;
    }
    check_string(s, true);
}

static void op_strbuf_free(void) {
    string *s = pick_string();
    if (!s || s->place == IN_TICK) return;
    free_string(s);
    forget_string(s);
}

/* ---- Operations: ticks ----------------------------------------------------------------------- */

static void check_name(const arena_tick *real, const char *name) {
    size_t length = lesser(strlen(name), 31); /* so much of it is copied */
    const char *got = arena_name(real);
    same("length of arena_name", length, strlen(got));
    if (memcmp(got, name, length)) mismatch("arena_name", length, length);
}

static arena_tick *begin_tick(const char *name) {
    os.for_records = true;
    os.fired = 0;
    model.asked = SIZE_MAX;
    arena_tick *real = arena_begin(name);
    os.for_records = false;
    if (!real) {
        if (!excused()) mismatch("arena_begin had memory, but failed", 1, 0);
        same("arena_error", (uint64_t)ARENA_E_NOMEM, (uint64_t)arena_error());
        return NULL;
    }
    check_name(real, name ? name : "");
    tick *t = &model.ticks[model.depth++];
    *t = (tick){.real = real, .limit = ARENA__UNLIMITED, .number = ++model.stats.ticks_begun};
    t->wipe = t > model.ticks && t[-1].wipe; /* what is wiped is so with all that is inside */
    same("arena_number", t->number, arena_number(real));
    for (size_t i = 0; i < model.ended_count; i++) /* the record is in use again */
        if (model.ended[i] == real) model.ended[i--] = model.ended[--model.ended_count];
    return real;
}

static void op_begin(void) {
    unsigned b = byte();
    size_t name_length = b % 64;
    const char *name = name_length ? pick_text(NULL, name_length - 1) : NULL;
    if (name_length > 61) name = name_length == 62 ? "a" : "b"; /* those of op_retain */
    if (b >= 224) forget_records();
    if (model.depth < MAX_TICKS) begin_tick(name);
}

static void end_tick(target to) {
    os.fired = 0;
    int expected = to.place == IN_TICK ? ARENA_OK : ARENA_E_ENDED;
    if (to.place == IN_TICK)
        for (tick *inner = to.tick; inner < model.ticks + model.depth; inner++) {
            if (inner->ending) expected = ARENA_E_ENDING;
            check_contents(inner);
        }
    if (!settle(expected, arena_end(to.arg))) return;
    while (model.ticks + model.depth > to.tick) model_close();
}

static void op_end(void) {
    end_tick(pick_tick());
}

/* Empty ticks, or ticks that all need the same: these must find it in the cache. */
static void idle(unsigned count, size_t size) {
    uint64_t maps = 0;
    while (count-- && model.depth < MAX_TICKS) {
        arena_tick *real = begin_tick(NULL);
        if (!real) return;
        int expected = foretell(pick_current(), size);
        if (size && !settle_pointer(expected, arena_alloc(real, size))) size = 0;
        if (size && maps && !(model.debug & KEPT) && model.retain[0].policy <= ARENA_RETAIN_ALL)
            same("a steady loop maps nothing", maps, model.stats.maps);
        maps = model.stats.maps;
        model.ticks[model.depth - 1].used = size;
        same("arena_end", ARENA_OK, (uint64_t)arena_end(real));
        model_close();
    }
}

static void op_idle(void) {
    unsigned b = byte();
    idle(b % 25, b > 127 ? b : 0);
}

static void begin_of(target *to, size_t size, int *expected) {
    begin_tick(NULL);
    *to = pick_current();
    *expected = foretell(*to, size);
}

static void wipe_tick(target to) {
    int expected = to.place == IN_TICK ? ARENA_OK : ARENA_E_ENDED;
    if (expected == ARENA_OK && to.tick->ending) expected = ARENA_E_ENDING;
    model.asked = os.fired = 0;
    if (!settle(expected, arena_wipe(to.arg))) return;
    to.tick->wipe = true;
    /* What they hold becomes secrets. */
    for (piece *p = model.pieces; p < model.pieces + model.piece_count; p++) {
        if (p->tick != to.tick) continue;
        check_piece(p);
        fill(p);
    }
}

static void op_wipe(void) {
    wipe_tick(pick_tick());
}

/* A tick that wipes less of a chunk than the one before has written. */
static void wiped_between(size_t size) {
    target to;
    int expected;
    begin_of(&to, size, &expected);
    wipe_tick(to);
    expected = foretell(to, size);
    char *at = arena_alloc(NULL, size);
    if (settle_pointer(expected, at)) adopt(IN_TICK, to.tick, at, size);
    end_tick(to);
}

/* What one tick wrote, into a block that grew or a string that did, another gets zeroed. */
static void op_reuse(void) {
    unsigned how = byte();
    size_t first = pick_size(NULL) % MAX_LENGTH, second = pick_size(NULL) % MAX_LENGTH;
    target to;
    int expected;
    /* Sizes that get a chunk of their own; a string's record takes the tick's first one. */
    if (how & 2) first = (how & 1 ? 17000 : 66000) + first % 40000, second = first + second % 40000;
    if (model.depth == MAX_TICKS || first > second || os.until) return;
    begin_of(&to, first, &expected);
    if (how & 4) wipe_tick(to);
    if (how & 1) {
        char *at = arena_alloc(NULL, first);
        if (settle_pointer(expected, at))
            realloc_in_tick(adopt(IN_TICK, to.tick, at, first), second);
    } else {
        arena_strbuf *real = arena_strbuf_new(NULL, first);
        if (model_may_charge(to.tick, second) == ARENA_OK
            && settle(ARENA_OK, arena_strbuf_append(real, noise_at(new_seed(to.tick)), second))) {
            to.tick->used += second;
            if (second > EDGE) note_dirt(arena_strbuf_data(real) + second - EDGE, EDGE);
        }
    }
    end_tick(to);
    if (how & 8) wiped_between(second % 64);
    second += how / 16 * 16; /* beyond what was written, too */
    begin_of(&to, second, &expected);
    char *at = arena_zalloc(NULL, second);
    if (settle_pointer(expected, at)) check_zero(at, second), adopt(IN_TICK, to.tick, at, second);
    end_tick(to);
}

static void op_limit(void) {
    target to = pick_tick();
    size_t bytes = pick_size(to.tick);
    size_t held = to.tick ? model_held(to.tick) : 0;
    if (bytes <= ABSURD) bytes = bytes % 4 ? held + bytes % 2048 : held - 1 + bytes % 512 / 4;
    int expected = to.place == IN_TICK ? ARENA_OK : ARENA_E_ENDED;
    size_t limit = lesser(bytes, ARENA__UNLIMITED);
    if (expected == ARENA_OK && to.tick->ending) expected = ARENA_E_ENDING;
    if (expected == ARENA_OK && limit < held) expected = ARENA_E_INVALID;
    if (settle(expected, arena_limit(to.arg, bytes))) to.tick->limit = limit;
}

static void op_process_limit(void) {
    unsigned b = byte();
    size_t held = process_held(), bytes = b < 96 ? SIZE_MAX : held + b % 32 * (b / 64) * 8;
    if (b > 223) bytes = held - b % 4;
    if (b > 250) bytes = ARENA__UNLIMITED - b % 2;
    int expected = bytes < held ? ARENA_E_INVALID : ARENA_OK;
    model.asked = os.fired = 0;
    if (settle(expected, arena_process_limit(bytes)))
        model.process_limit = bytes < ARENA__UNLIMITED ? bytes : SIZE_MAX;
}

/* Mostly off again: what is kept costs mappings. */
static void op_debug(void) {
    unsigned b = byte();
    int flags = b < 96 ? (int)b % 8 : b < 128 ? ARENA_DEBUG_FILL : 0;
    if (b == 255) {
        same("arena_debug of no flag", (uint64_t)ARENA_E_INVALID, (uint64_t)arena_debug(8));
        return;
    }
    same("flags before", (uint64_t)model.debug, (uint64_t)arena_debug(flags));
    model.debug = flags;
    same("flags now", (uint64_t)flags, (uint64_t)arena_debug_now());
}

static void op_trim(void) {
    unsigned b = byte();
    arena_stats before, after;
    size_t keep = b < 64 ? 0 : (size_t)b << 12;
    arena_stats_get(&before);
    os.smallest = SIZE_MAX;
    size_t given = arena_trim(keep);
    arena_stats_get(&after);
    same("bytes that arena_trim gave back", before.cached - after.cached, given);
    same("arena_trim keeps no more", true, after.cached <= keep);
    if (given) same("arena_trim gives no chunk too many", true, after.cached + os.smallest > keep);
    if (before.cached <= keep) same("arena_trim has nothing to do", 0, given);
}

static int index_of(const char *name) {
    return *name ? 1 + *name - 'a' : 0;
}

/* What is cached is within each policy, and no pool's is another's. */
static void check_retained(const char *when) {
    static const char *const names[] = {"", "a", "b"};
    arena_retained rows[4];
    arena_stats s;
    uint64_t cached = 0;
    size_t count = arena_retention(rows, 4);
    arena_stats_get(&s);
    if (count < 1 || count > 3) mismatch(when, 3, count);
    for (size_t i = 0; i < count; i++) {
        int which = index_of(rows[i].name);
        if (which < 0 || which > 2 || strcmp(names[which], rows[i].name)) mismatch("a name", 0, i);
        same("the policy", (uint64_t)model.retain[which].policy, (uint64_t)rows[i].policy);
        cached += rows[i].cached;
        if (rows[i].policy == ARENA_RETAIN_NONE) same("cached though nothing is to be", 0, rows[i].cached);
        if (rows[i].policy == ARENA_RETAIN_BYTES)
            same("no more cached than may be", true, rows[i].cached <= model.retain[which].most);
    }
    same(when, s.cached, cached);
}

static void retain(const char *name, int policy, size_t most) {
    bool sense = *name || policy != ARENA_RETAIN_AS_PROCESS;
    int expected = sense ? ARENA_OK : ARENA_E_INVALID;
    same("arena_retain", (uint64_t)expected, (uint64_t)arena_retain(name, policy, most));
    if (sense) {
        model.retain[index_of(name)].policy = policy;
        model.retain[index_of(name)].most = most;
    }
    check_retained("cached by each policy");
}

static void op_retain(void) {
    static const char *const names[] = {"", "a", "b"};
    unsigned b = byte();
    retain(names[b % 3], (int)(b / 3 % 5), (size_t)(b / 15) << 16);
}

static void op_fault(void) {
    unsigned b = byte();
    os.until = 1 + b % 8;
    os.times = 1 + b / 8 % 6;
}

/* ---- Operations: pins ------------------------------------------------------------------------ */

static void op_pin(void) {
    target to = pick_tick();
    size_t size = pick_size(to.tick);
    if (to.place == STRAY || model.pin_count == MAX_PINS) return;
    arena__chunk *chunk = NULL;
    int expected = foretell(to, size);
    char *at = arena__alloc_in(to.tick ? to.tick->real : to.arg, size, &chunk);
    if (!settle_pointer(expected, at)) return;
    adopt(IN_TICK, to.tick, at, size);
    same("the chunk of a piece", (uintptr_t)chunk_in(mapping_of(at, size), at), (uintptr_t)chunk);
    arena__pin(chunk);
    pin *p = pin_over(at);
    if (!p) {
        p = &model.pins[model.pin_count++];
        *p = (pin){chunk, chunk->size, 0, to.tick};
    }
    p->count++;
}

static void unpin(pin *p) {
    if (p->count == 1 && !p->tick) {
        for (size_t i = model.piece_count; i-- > 0;) {
            piece *kept = &model.pieces[i];
            if (apart(kept->at, 1, p->chunk, p->size)) continue;
            check_piece(kept);
            forget_piece(kept);
        }
        model.stats.pinned -= p->size;
        model.stats.pinned_count--;
    }
    arena__unpin(p->chunk);
    if (--p->count == 0) *p = model.pins[--model.pin_count];
}

static void op_unpin(void) {
    unsigned b = byte();
    if (model.pin_count) unpin(&model.pins[b % model.pin_count]);
}

/* ---- Operations: cleanups -------------------------------------------------------------------- */

enum { RECORD, MISUSE, PROGRAM, LEAVE_OPEN, KINDS };

static void run_one(void);
static void add_cleanup(target to, unsigned kind, unsigned detail);

/* All that a cleanup may not do in its tick. */
static void misuse(tick *t) {
    const uint64_t ending = (uint64_t)ARENA_E_ENDING;
    arena__chunk *chunk;
    same("arena_end in a cleanup", ending, (uint64_t)arena_end(t->real));
    same("arena_end of the outermost", ending, (uint64_t)arena_end(model.ticks[0].real));
    same("arena_limit in a cleanup", ending, (uint64_t)arena_limit(t->real, SIZE_MAX));
    same("arena_wipe in a cleanup", ending, (uint64_t)arena_wipe(t->real));
    same("arena_alloc in a cleanup", 0, (uintptr_t)arena_alloc(t->real, 0));
    same("arena_zalloc in a cleanup", 0, (uintptr_t)arena_zalloc(t->real, 16));
    same("arena__alloc_in in a cleanup", 0, (uintptr_t)arena__alloc_in(t->real, 1, &chunk));
    same("arena_strbuf_new in a cleanup", 0, (uintptr_t)arena_strbuf_new(t->real, 5));
    same("arena_printf in a cleanup", 0, (uintptr_t)arena_printf(t->real, "%d", 5));
    for (string *own = model.strings; own < model.strings + model.string_count; own++)
        if (own->tick == t)
            same("an append of nothing in a cleanup", ending,
                 (uint64_t)arena_strbuf_append(own->real, "", 0));
    same("arena_error in a cleanup", ending, (uint64_t)arena_error());
}

static void run_cleanup(void *arg) {
    note *n = arg;
    tick *t = n->tick;
    if (!t->ending) { /* its first: the ticks inside have ended by now */
        while (&model.ticks[model.depth - 1] != t) model_close();
        t->ending = true;
    }
    same("order of cleanups", (uintptr_t)t->notes, (uintptr_t)n);
    t->notes = n->below;
    check_stats();
    check_contents(NULL);
    if (n->kind == MISUSE) misuse(t);
    if (n->kind == LEAVE_OPEN && model.depth < MAX_TICKS && begin_tick("left open")) {
        if (n->detail % 2) add_cleanup(pick_current(), RECORD, 0);
    }
    if (n->kind == PROGRAM && model.nesting < MAX_NESTING) {
        model.nesting++;
        for (unsigned i = 0; i <= n->detail % 4 && in < in_end; i++) run_one();
        model.nesting--;
    }
}

static void add_cleanup(target to, unsigned kind, unsigned detail) {
    if (model.note_count == MAX_NOTES) return;
    note *n = &model.notes[model.note_count];
    *n = (note){NULL, to.tick, kind, detail};
    int expected = foretell(to, 0);
    if (to.place == STRAY) expected = ARENA_E_ENDED;
    if (!settle(expected, arena_cleanup(to.arg, run_cleanup, n))) return;
    n->below = to.tick->notes;
    to.tick->notes = n;
    model.note_count++;
}

static void op_cleanup(void) {
    target to = pick_tick();
    unsigned kind = byte();
    add_cleanup(to, kind % KINDS, kind / KINDS);
}

/* ---- The program ----------------------------------------------------------------------------- */

/* A new call is a line here, at the end (the corpus counts on it), and a function above. */
static const struct {
    const char *name;
    void (*run)(void);
} table[] = {
    {"begin", op_begin},
    {"end", op_end},
    {"alloc", op_alloc},
    {"zalloc", op_zalloc},
    {"realloc", op_realloc},
    {"memdup", op_memdup},
    {"strdup", op_strdup},
    {"strndup", op_strndup},
    {"printf", op_printf},
    {"realloc_persist", op_realloc_persist},
    {"free_persist", op_free_persist},
    {"strbuf_new", op_strbuf_new},
    {"strbuf_append", op_strbuf_append},
    {"strbuf_puts", op_strbuf_puts},
    {"strbuf_printf", op_strbuf_printf},
    {"strbuf_append of itself", op_strbuf_append_self},
    {"strbuf_puts of itself", op_strbuf_puts_self},
    {"strbuf_reserve", op_strbuf_reserve},
    {"strbuf_truncate", op_strbuf_truncate},
    {"strbuf_free", op_strbuf_free},
    {"limit", op_limit},
    {"cleanup", op_cleanup},
    {"pin", op_pin},
    {"unpin", op_unpin},
    {"trim", op_trim},
    {"idle ticks", op_idle},
    {"reuse", op_reuse},
    {"fault", op_fault},
    {"wipe", op_wipe},
    {"process_limit", op_process_limit},
    {"debug", op_debug},
    {"retain", op_retain},
};

static void run_one(void) {
    unsigned code = byte() % (sizeof table / sizeof *table);
    running = table[code].name;
    operations++;
    if (tracing) fprintf(stderr, "fuzz: %*s%s\n", (int)(2 * model.depth), "", running);
    make_room();
    table[code].run();
    check_stats();
    check_sample();
}

/* Everything ends, and is as it was before the input. */
static void count_alive(const arena_escape *row, void *arg) {
    uint64_t *alive = arg;
    if (row->count_ever < row->count || row->bytes_ever < row->bytes)
        mismatch("a row that ever had less than it has", row->bytes_ever, row->bytes);
    if (!row->count && row->bytes) mismatch("bytes of nothing in a row", 0, row->bytes);
    *alive += row->bytes;
}

/* The map of escapes holds what is persisted and what strays, when sites were recorded all along. Not
 * in each input: there may be thousands of rows. */
static void check_rows(void) {
    static unsigned inputs;
    uint64_t alive = 0, expected = model.stats.persisted + model.stats.strays;
    if (inputs++ % 128) return;
    (void)arena_escapes(count_alive, &alive);
    same("bytes alive in the rows", arena_tracing() ? expected : 0, alive);
}

static void finish(void) {
    running = "(finish)";
    os.until = 0;
    model.process_limit = SIZE_MAX;
    same("arena_process_limit", ARENA_OK, (uint64_t)arena_process_limit(SIZE_MAX));
    check_contents(NULL);
    if (model.depth) end_tick((target){IN_TICK, &model.ticks[0], model.ticks[0].real});
    check_stats();
    check_rows();
    while (model.pin_count) unpin(&model.pins[0]);
    while (model.string_count) {
        free_string(&model.strings[0]);
        forget_string(&model.strings[0]);
    }
    while (model.piece_count) free_piece(&model.pieces[0]);
    const arena_stats *m = &model.stats;
    same("what is left persisted", 0, m->persisted + m->persisted_count);
    same("what is left of strays and pins", 0, m->strays + m->strays_count + m->pinned);
    check_stats();
    same("flags at the end", (uint64_t)model.debug, (uint64_t)arena_debug(0));
    model.debug = 0;
    purge();
    check_retained("cached at the end");
    retain("", ARENA_RETAIN_ADAPTIVE, 0);
    retain("a", ARENA_RETAIN_AS_PROCESS, 0);
    retain("b", ARENA_RETAIN_AS_PROCESS, 0);
    /* What the cache keeps is forgotten after three windows, counted from an end of one. */
    idle(1, 1);
    idle((unsigned)(ARENA__WINDOW - model.stats.ticks_ended % ARENA__WINDOW), 0);
    idle(3 * ARENA__WINDOW, 0);
    check_stats();
    arena_stats s;
    arena_stats_get(&s);
    same("the cache after three windows without use", 0, s.cached);
    same("high_water after three windows without use", 0, s.high_water);
    same("mappings left", 0, os.count);
    unmap_records();
    same("bytes that the process holds", ARENA_OK, (uint64_t)arena_process_limit(0));
    same("arena_process_limit", ARENA_OK, (uint64_t)arena_process_limit(SIZE_MAX));
}

static void print_operations(void) {
    fprintf(stderr, "fuzz: %llu operations\n", (unsigned long long)operations);
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    uint32_t x = 2463534242u;
    for (size_t i = 0; i < sizeof *noise; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        noise[0][i] = (uint8_t)(1 + (x >> 8) % 127);
        noise[1][i] = (uint8_t)(128 + (x >> 8) % (ARENA__FILL - 128));
    }
    (void)arena_trace(1); /* its tables are mapped once, and by the system itself */
    arena__system = (arena__os){os_map, os_unmap, os_remap, os_seal, os_resize, free};
    tracing = getenv("FUZZ_TRACE") != NULL;
    atexit(print_operations);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    arena_stats stats = model.stats;
    memset(&model, 0, sizeof model);
    model.stats = stats;
    model.budget = BUDGET;
    model.process_limit = SIZE_MAX;
    model.retain[1].policy = model.retain[2].policy = ARENA_RETAIN_AS_PROCESS;
    for (size_t i = 0; i < MAX_STRINGS; i++) model.strings[i].copy = copies[i];
    in = data;
    in_end = data + size;
    /* Nothing is mapped and nothing is open: here both may be turned. */
    unsigned watched = byte();
    arena__checking = watched % 2;
    (void)arena_trace(watched / 2 % 2);
    ARENA__STORE(arena__counting, false);
    while (in < in_end) run_one();
    finish();
    return 0;
}
