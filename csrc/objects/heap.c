/* heap.c: blocks in spans.
 *
 * A span holds slots of one size class; a larger block has a run of spans to itself. What is free is a
 * bit in the span's record and nothing in the slot, so that free memory is never touched. What is known
 * of a block is a note in a table at the side, for a header in front of it would cost the alignment.
 *
 * The classes, six to eight for each doubling, are what divides a span well, and what dicts ask for:
 * their tables come in a few sizes (568, 768, 1104, 1520, 2200, 3264, 6512, 12992 bytes). With 21 classes
 * instead of 33 the peak of benchmarks/objects.py was 5 % higher (74.3 MB, not 70.8).
 *
 * Which slot next: the lowest free one of the lowest span of the class that has any. Spans that hold
 * what has escaped from earlier ticks are such spans, so their holes are filled first; what escapes
 * next lies between what escaped before, and is dense. The garbage of a tick in the other holes cannot
 * fragment anything: it is gone at the tick's end. (Staying with a span until it is full made no
 * difference that could be measured; this order leaves the top free, which goes back first.)
 */
#include "objects.h"

#include <sys/mman.h>

/* Slots in a span, for each class. */
static const uint8_t SLOTS[] = {124, 113, 102, 93, 85, 77, 70, 64, 59, 53, 48, 43, 39, 35, 32, 29,
                                26,  23,  20,  18, 16, 14, 12, 11, 10, 9,  8,  7,  6,  5,  4,  3,
                                2};
enum { CLASSES = sizeof SLOTS };
#define SLOT_MAX (ARENA__SPAN / 2)
/* A block that moves is copied in parts of this size, and the memory of each part that was copied goes
 * back at once, so that it never takes twice its size. */
#define PART ((size_t)1 << 20)
/* A run of this many spans (4 MiB) is zeroed by giving its memory back: pages that nobody writes to
 * then take none. Those that somebody does cost more than writing zeros, 2 us each against 0.4. */
enum { BLANK_RUN = 64 };

arena__tally arena__counted;

enum { STIRRED = CLASSES, MAPS };

static struct {
    uint64_t *open[MAPS]; /* a bit for each span of the class that has a free slot; and the last: for
                           * each span that a tick had blocks in since the last rest */
    uint32_t stirred_end; /* of that map, in words */
    uint32_t lowest[CLASSES];
    uint32_t open_count[CLASSES];
    uint32_t size[CLASSES];
    uint32_t magic[CLASSES];
    uint8_t class_of[SLOT_MAX / 16];
    uint32_t page;
} heap;

bool arena__heap_set_up(void) {
    if (arena__region.size) return true;
    heap.page = (uint32_t)sysconf(_SC_PAGESIZE);
    unsigned klass = 0;
    for (unsigned k = 0; k < CLASSES; k++) {
        heap.size[k] = (uint32_t)(ARENA__SPAN / SLOTS[k]) & ~15u;
        heap.magic[k] = (uint32_t)((((uint64_t)1 << 32) + heap.size[k] - 1) / heap.size[k]);
        heap.lowest[k] = ARENA__NONE;
    }
    for (unsigned i = 0; i < SLOT_MAX / 16; i++) {
        if ((i + 1) * 16 > heap.size[klass]) klass++;
        heap.class_of[i] = (uint8_t)klass;
    }
    return arena__region_reserve(MAPS, heap.open);
}

static arena__note *notes_of(uint32_t at) {
    return arena__region.notes + (size_t)at * ARENA__NOTES;
}

/* The end of the slots' bits: those behind it are never set. */
static void all_free(arena__span *span, unsigned slots) {
    span->free[0] = slots >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << slots) - 1;
    span->free[1] = slots > 64 ? ((uint64_t)1 << (slots - 64)) - 1 : 0;
}

static void open_span(unsigned klass, uint32_t at) {
    heap.open[klass][at >> 6] |= (uint64_t)1 << (at & 63);
    heap.open_count[klass]++;
    if (at < heap.lowest[klass]) heap.lowest[klass] = at;
}

static void close_span(unsigned klass, uint32_t at) {
    heap.open[klass][at >> 6] &= ~((uint64_t)1 << (at & 63));
    heap.open_count[klass]--;
    if (at != heap.lowest[klass]) return;
    heap.lowest[klass] =
        heap.open_count[klass]
            ? arena__next_one(heap.open[klass], at + 1, arena__region.committed)
            : ARENA__NONE;
}

static uint32_t new_span(unsigned klass) {
    bool clean;
    uint32_t at = arena__spans_take(1, &clean);
    if (at == ARENA__NONE) return at;
    arena__span *span = &arena__region.spans[at];
    all_free(span, SLOTS[klass]);
    span->size = heap.size[klass];
    span->count = 1;
    span->magic = heap.magic[klass];
    span->live = 0;
    span->blank = 0;
    span->klass = (uint8_t)klass;
    span->state = ARENA__SLOTS;
    if (arena__checked()) arena__check_shut(arena__span_start(at), ARENA__SPAN);
    open_span(klass, at);
    return at;
}

static void count_in(arena__capture *capture, size_t size) {
    capture->live++;
    arena__counted.captured++;
    arena__counted.captured_bytes += size;
}

/* A block is no more: whose it was is told. */
static void count_out(arena__note note, size_t size) {
    if (note.tag) {
        arena__by_tag[note.tag]->live--;
        arena__counted.captured--;
        arena__counted.captured_bytes -= size;
        return;
    }
    arena__counted.escaped--;
    arena__counted.escaped_bytes -= size;
    if (note.site) arena__host.gone(note.site, size);
}

static void hand_out(void *block, size_t size) {
    if (arena__checked()) arena__check_piece(&arena__region, block, size);
}

static void take_in(void *block, size_t room) {
    if (!arena__checked()) return;
    arena__check_gone(&arena__region, block);
    arena__check_shut(block, room);
}

static void link_run(arena__capture *capture, uint32_t at) {
    arena__span *span = &arena__region.spans[at];
    span->prev = ARENA__NONE;
    span->next = capture->runs;
    if (span->next != ARENA__NONE) arena__region.spans[span->next].prev = at;
    capture->runs = at;
}

static void unlink_run(arena__capture *capture, const arena__span *span) {
    if (span->next != ARENA__NONE) arena__region.spans[span->next].prev = span->prev;
    if (span->prev != ARENA__NONE)
        arena__region.spans[span->prev].next = span->next;
    else
        capture->runs = span->next;
}

static uint32_t spans_for(size_t size) {
    return (uint32_t)((size + ARENA__SPAN - 1) >> ARENA__SPAN_SHIFT);
}

static void *new_run(arena__capture *capture, uint32_t site, size_t size, bool zero) {
    if (size > arena__region.size) return NULL;
    bool clean;
    uint32_t count = spans_for(size), at = arena__spans_take(count, &clean);
    if (at == ARENA__NONE) return NULL;
    arena__span *span = &arena__region.spans[at];
    span->size = size;
    span->count = count;
    span->state = ARENA__RUN;
    *notes_of(at) = (arena__note){site, capture->tag, 0};
    link_run(capture, at);
    count_in(capture, size);
    char *block = arena__span_start(at);
    hand_out(block, size);
    if (zero && !clean && (count < BLANK_RUN || !arena__spans_blank(at, count)))
        memset(block, 0, size);
    if (arena__checked()) {
        if (zero) arena__check_open(block, size);
        arena__check_shut(block + size, ((size_t)count << ARENA__SPAN_SHIFT) - size);
    }
    return block;
}

static uint16_t pages_of(size_t start, size_t size) {
    size_t first = start / heap.page, last = (start + size - 1) / heap.page;
    return (uint16_t)(((uint32_t)2 << last) - ((uint32_t)1 << first));
}

/* A block of more than ARENA__SMALL bytes for the capture; NULL when there is no room. */
void *arena__block_new(arena__capture *capture, uint32_t site, size_t size, bool zero) {
    if (ARENA__UNLIKELY(size > SLOT_MAX)) return new_run(capture, site, size, zero);
    unsigned klass = heap.class_of[(size - 1) >> 4];
    uint32_t at = heap.lowest[klass];
    if (ARENA__UNLIKELY(at == ARENA__NONE)) {
        at = new_span(klass);
        if (at == ARENA__NONE) return NULL;
    }
    arena__span *span = &arena__region.spans[at];
    uint32_t word = at >> 6;
    if (ARENA__UNLIKELY(word >= capture->words) && !arena__capture_widen(capture, word)) {
        if (!span->live) { /* it was made for this */
            close_span(klass, at);
            span->state = ARENA__FREE;
            arena__spans_put(at, 1, true);
        }
        return NULL;
    }
    capture->seen[word] |= (uint64_t)1 << (at & 63);
    if (word < capture->low) capture->low = word;
    if (word >= capture->high) capture->high = word + 1;
    unsigned half = !span->free[0];
    unsigned slot = (half << 6) + (unsigned)__builtin_ctzll(span->free[half]);
    span->free[half] &= span->free[half] - 1;
    span->live++;
    if (!(span->free[0] | span->free[1])) close_span(klass, at);
    size_t start = slot * span->size;
    if (ARENA__UNLIKELY(span->blank)) span->blank &= (uint16_t)~pages_of(start, span->size);
    notes_of(at)[slot] =
        (arena__note){site, capture->tag, (uint16_t)(span->size - size)};
    count_in(capture, size);
    char *block = arena__span_start(at) + start;
    hand_out(block, size);
    if (zero) memset(block, 0, size);
    return block;
}

static void free_run(uint32_t at, arena__span *span, bool dirty) {
    arena__note note = *notes_of(at);
    if (note.tag) unlink_run(arena__by_tag[note.tag], span);
    span->state = ARENA__FREE;
    take_in(arena__span_start(at), (size_t)span->count << ARENA__SPAN_SHIFT);
    arena__spans_put(at, span->count, dirty);
    count_out(note, span->size);
}

static bool slot_of(const void *block, uint32_t at, const arena__span *span, unsigned *slot) {
    size_t offset = (uintptr_t)block & (ARENA__SPAN - 1);
    (void)at;
    *slot = (unsigned)((offset * span->magic) >> 32);
    return *slot * span->size == offset && *slot < SLOTS[span->klass] &&
           !(span->free[*slot >> 6] >> (*slot & 63) & 1);
}

static uint32_t span_of(const void *block) {
    return (uint32_t)(((uintptr_t)block - arena__region.base) >> ARENA__SPAN_SHIFT);
}

/* Frees a block of ours. What is none (freed twice, or a pointer into one) is left alone. */
void arena__block_free(void *block) {
    uint32_t at = span_of(block);
    if (ARENA__UNLIKELY(at >= arena__region.committed)) return;
    arena__span *span = &arena__region.spans[at];
    unsigned slot;
    if (ARENA__UNLIKELY(span->state != ARENA__SLOTS)) {
        if (span->state == ARENA__RUN && block == arena__span_start(at)) free_run(at, span, true);
        return;
    }
    if (ARENA__UNLIKELY(!slot_of(block, at, span, &slot))) return;
    arena__note note = notes_of(at)[slot];
    size_t size = span->size - note.slack;
    take_in(block, span->size);
    bool was_full = !(span->free[0] | span->free[1]);
    span->free[slot >> 6] |= (uint64_t)1 << (slot & 63);
    if (!--span->live) {
        if (!was_full) close_span(span->klass, at);
        span->state = ARENA__FREE;
        arena__spans_put(at, 1, true);
    } else if (was_full) {
        open_span(span->klass, at);
    }
    count_out(note, size);
}

/* Where a block of ours lies; false when it is none. */
bool arena__block_find(const void *block, arena__place *place) {
    uint32_t at = span_of(block);
    if (at >= arena__region.committed) return false;
    arena__span *span = &arena__region.spans[at];
    unsigned slot = 0;
    *place = (arena__place){.span = span, .at = at};
    if (span->state == ARENA__RUN && block == arena__span_start(at)) {
        place->note = notes_of(at);
        place->size = span->size;
        place->room = (size_t)span->count << ARENA__SPAN_SHIFT;
        return true;
    }
    if (span->state != ARENA__SLOTS || !slot_of(block, at, span, &slot)) return false;
    place->note = &notes_of(at)[slot];
    place->size = span->size - place->note->slack;
    place->room = span->size;
    return true;
}

/* The block gets another size where it lies. */
static void resized(void *block, const arena__place *place, size_t size) {
    arena__note *note = place->note;
    size_t old = place->size;
    if (note->tag) {
        arena__counted.captured_bytes += size - old;
    } else {
        arena__counted.escaped_bytes += size - old;
        if (note->site) arena__host.resized(note->site, old, size);
    }
    if (place->span->state == ARENA__RUN)
        place->span->size = size;
    else
        note->slack = (uint16_t)(place->room - size);
    if (!arena__checked()) return;
    if (size > old)
        arena__check_grown(&arena__region, block, old, size);
    else
        arena__check_shut((char *)block + size, old - size);
}

/* Makes the block `size` bytes where it lies; false when it has to move. A block that would leave half
 * of a slot or more unused moves. */
bool arena__block_fit(void *block, const arena__place *place, size_t size) {
    arena__span *span = place->span;
    if (size <= ARENA__SMALL) return false;
    if (span->state == ARENA__SLOTS) {
        if (size > place->room || size < place->room / 2) return false;
        resized(block, place, size);
        return true;
    }
    if (size <= SLOT_MAX || size > arena__region.size) return false;
    uint32_t count = spans_for(size), before = span->count;
    bool clean;
    if (count > before && !arena__spans_extend(place->at, before, count - before, &clean))
        return false;
    span->count = count;
    resized(block, place, size);
    if (count < before) arena__spans_put(place->at + count, before - count, true);
    return true;
}

/* Moves a block to another place of ours; NULL when there is none, and the block is as it was. */
void *arena__block_move(void *block, const arena__place *place, arena__capture *capture,
                        uint32_t site, size_t size) {
    char *to = arena__block_new(capture, site, size, false), *from = block;
    if (!to) return NULL;
    size_t rest = place->size < size ? place->size : size;
    if (rest < 2 * PART) {
        memcpy(to, from, rest);
        arena__block_free(block);
        return to;
    }
    for (; rest > PART; to += PART, from += PART, rest -= PART) {
        memcpy(to, from, PART);
        uint32_t part = (uint32_t)((size_t)(from - (char *)block) >> ARENA__SPAN_SHIFT);
        (void)arena__spans_blank(place->at + part, (uint32_t)(PART >> ARENA__SPAN_SHIFT));
    }
    memcpy(to, from, rest);
    size_t copied = (size_t)(from - (char *)block);
    free_run(place->at, place->span, true);
    return to - copied;
}

static void escape(arena__capture *capture, arena__note *note, const char *block, size_t size) {
    uint32_t row = arena__host.escaped(capture->tick, note->site, size);
    *note = (arena__note){row, 0, note->slack};
    capture->live--;
    arena__counted.captured--;
    arena__counted.captured_bytes -= size;
    arena__counted.escaped++;
    arena__counted.escaped_bytes += size;
    if (row && arena__host.wants_example(row)) {
        char text[256];
        arena__host.example(row, text, arena__example(block, size, text, sizeof text));
    }
}

static void escape_slots(arena__capture *capture, uint32_t at) {
    arena__span *span = &arena__region.spans[at];
    if (span->state != ARENA__SLOTS) return; /* what the capture had there is gone */
    unsigned slots = SLOTS[span->klass];
    for (unsigned slot = 0; slot < slots && capture->live; slot++) {
        arena__note *note = &notes_of(at)[slot];
        if (span->free[slot >> 6] >> (slot & 63) & 1 || note->tag != capture->tag) continue;
        escape(capture, note, arena__span_start(at) + slot * span->size, span->size - note->slack);
    }
}

/* All that is alive of a capture has escaped. Returns how many blocks that are. */
size_t arena__blocks_escape(arena__capture *capture) {
    size_t before = capture->live;
    if (capture->high > heap.stirred_end) heap.stirred_end = capture->high;
    for (uint32_t word = capture->low; word < capture->high; word++) {
        heap.open[STIRRED][word] |= capture->seen[word];
        for (uint64_t bits = capture->seen[word]; bits && capture->live; bits &= bits - 1)
            escape_slots(capture, (word << 6) + (uint32_t)__builtin_ctzll(bits));
        capture->seen[word] = 0;
    }
    while (capture->runs != ARENA__NONE) {
        uint32_t at = capture->runs;
        arena__span *span = &arena__region.spans[at];
        capture->runs = span->next;
        escape(capture, notes_of(at), arena__span_start(at), span->size);
    }
    capture->low = ARENA__NONE;
    capture->high = 0;
    return before;
}

/* Nobody is told any more of what has escaped until now. */
void arena__blocks_forget_rows(void) {
    uint32_t end = arena__region.committed;
    if (!end) return;
    for (uint32_t at = arena__next_one(arena__region.used, 0, end); at < end;
         at = arena__next_one(arena__region.used, at + 1, end)) {
        const arena__span *span = &arena__region.spans[at];
        unsigned slots = span->state == ARENA__SLOTS ? SLOTS[span->klass] : span->state == ARENA__RUN;
        for (unsigned slot = 0; slot < slots; slot++)
            if (!notes_of(at)[slot].tag) notes_of(at)[slot].site = 0;
    }
}

/* The pages of a span that lie in free slots alone and hold memory. */
static uint16_t idle_pages(const arena__span *span) {
    uint32_t busy = span->blank;
    unsigned slots = SLOTS[span->klass];
    for (unsigned slot = 0; slot < slots; slot++)
        if (!(span->free[slot >> 6] >> (slot & 63) & 1))
            busy |= pages_of(slot * span->size, span->size);
    return (uint16_t)~busy;
}

/* Gives those pages back. Returns how many, and adds to the calls that it took. */
static unsigned blank_pages(uint32_t at, uint64_t *calls) {
    arena__span *span = &arena__region.spans[at];
    uint32_t idle = idle_pages(span);
    unsigned given = 0;
    span->blank |= (uint16_t)idle;
    while (idle) {
        unsigned first = (unsigned)__builtin_ctz(idle);
        unsigned count = (unsigned)__builtin_ctz(~(idle >> first));
        idle &= ~(((1u << count) - 1) << first);
        if (madvise(arena__span_start(at) + first * heap.page, count * heap.page, MADV_DONTNEED) == 0)
            given += count;
        ++*calls;
    }
    arena__region.given_back += given * heap.page;
    return given;
}

static bool knows_pages(void) {
    return ARENA__SPAN / heap.page == 16; /* else `blank` does not have a bit for each */
}

/* Gives back the whole pages between the blocks of spans that are in use. Returns bytes. */
size_t arena__heap_trim(void) {
    uint64_t calls = 0;
    size_t given = 0;
    if (!heap.page || !knows_pages()) return 0;
    for (unsigned klass = 0; klass < CLASSES; klass++) {
        uint32_t at = heap.lowest[klass], end = arena__region.committed;
        for (; at < end; at = arena__next_one(heap.open[klass], at + 1, end))
            given += blank_pages(at, &calls) * heap.page;
    }
    return given;
}

/* The same, where ticks had blocks since the last time, until it has taken as long as that many pages.
 * Returns what it took in pages, with so many for each call. */
uint64_t arena__heap_rest(uint64_t pages, uint64_t per_call) {
    uint64_t calls = 0, given = 0;
    if (!knows_pages()) return 0;
    while (heap.stirred_end) {
        uint64_t *word = &heap.open[STIRRED][heap.stirred_end - 1];
        for (; *word; *word &= ~((uint64_t)1 << (63 - __builtin_clzll(*word)))) {
            uint32_t at = ((heap.stirred_end - 1) << 6) + 63 - (uint32_t)__builtin_clzll(*word);
            const arena__span *span = &arena__region.spans[at];
            if (given + calls * per_call >= pages) return given + calls * per_call;
            if (span->state == ARENA__SLOTS && (span->free[0] | span->free[1]))
                given += blank_pages(at, &calls);
        }
        heap.stirred_end--;
    }
    return given + calls * per_call;
}
