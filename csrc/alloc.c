/* alloc.c: bump allocation, duplicates, printf.
 *
 * A tick's chunks double in size as it grows, so that a large tick makes few mappings and a small
 * one wastes little. A request larger than a quarter of the next chunk gets one of its own: the
 * rest of the current chunk stays in use, and a growing string that moves on can give its old
 * chunk back at once. Each of these counts towards the growth as the smallest chunk does: many
 * requests of one size soon share chunks (1,000 of 20 KB took 1,000 chunks before), and one large
 * request does not make the next chunk large. Oversize never counts.
 */
#include "internal.h"

#include <stdio.h>

static size_t next_chunk(const arena_tick *tick) {
    size_t size = ARENA__CHUNK_MIN;
    while (size * 2 <= tick->grown && size < ARENA__CHUNK_MAX) size *= 2;
    return size;
}

/* A piece is handed out: to whoever watches. */
static inline void tell(arena_tick *tick, const void *data, size_t size) {
    if (arena__checked()) arena__check_piece(tick, data, size);
    if (ARENA__UNLIKELY(tick->depth)) arena__log(tick, data, size);
}

/* Memory of the tick that nobody is charged for. NULL: no memory; the caller says so. */
void *arena__take(arena_tick *tick, size_t size, arena__chunk **chunk) {
    size_t span = size ? arena__round(size) : ARENA__ALIGN;
    if (span > (size_t)(tick->end - tick->pos)) {
        size_t next = next_chunk(tick);
        /* A chunk taken without a claim (a string's record) would open the fast path. */
        if (ARENA__LOAD(arena__counting) && !arena__is_over(tick)) arena__make_strict(tick);
        bool alone = span > next / 4;
        arena__chunk *fresh = arena__chunk_get(tick, alone ? span : next - ARENA__HEAD, alone);
        /* The growth may be what does not fit; what was asked for still may. */
        if (!fresh && !alone && next > ARENA__CHUNK_MIN) {
            next = ARENA__CHUNK_MIN;
            while (next - ARENA__HEAD < span) next *= 2;
            fresh = arena__chunk_get(tick, next - ARENA__HEAD, false);
        }
        if (!fresh) return NULL;
        char *data = (char *)fresh + ARENA__HEAD;
        *chunk = fresh;
        if (alone) {
            fresh->extent = ARENA__HEAD + span;
            if (fresh->klass != ARENA__OVERSIZE) tick->grown += ARENA__CHUNK_MIN;
            tell(tick, data, size);
            return data;
        }
        if (tick->current) tick->current->extent = (size_t)(tick->pos - (char *)tick->current);
        tick->current = fresh;
        tick->grown += next;
        tick->pos = data;
        tick->end = (char *)fresh + fresh->size;
    }
    void *data = tick->pos;
    tick->pos += span;
    *chunk = tick->current;
    tell(tick, data, size);
    return data;
}

ARENA__NOINLINE void *arena__alloc_slow(arena_tick *tick, size_t size, arena__chunk **chunk) {
    if (arena__claim(tick, size) != ARENA_OK) return NULL;
    void *data = arena__take(tick, size, chunk);
    if (!data) {
        arena__refund(tick, size);
        arena__fail(ARENA_E_NOMEM);
    }
    return data;
}

/* Grows the room of a block where it lies, from old_size to size bytes. Charges nobody. */
bool arena__extend(arena_tick *tick, arena__chunk *chunk, void *data, size_t old_size, size_t size) {
    size_t old_span = old_size ? arena__round(old_size) : ARENA__ALIGN;
    size_t span = size ? arena__round(size) : ARENA__ALIGN;
    if (span > old_span) {
        if (chunk->alone) {
            if (span > chunk->size - ARENA__HEAD) return false;
            if (ARENA__HEAD + span > chunk->extent) chunk->extent = ARENA__HEAD + span;
        } else {
            if ((char *)data + old_span != tick->pos) return false;
            if (span - old_span > (size_t)(tick->end - tick->pos)) return false;
            tick->pos += span - old_span;
        }
    }
    if (arena__checked()) arena__check_grown(tick, data, old_size, size);
    return true;
}

static ARENA__NOINLINE void tell_defined(const void *data, size_t size) {
    arena__check_open(data, size);
}

/* Zeroes a fresh allocation, but not the pages that the system has just zeroed. */
void arena__zero(arena__chunk *chunk, void *data, size_t size) {
    size_t start = (size_t)((char *)data - (char *)chunk);
    if (arena__checked()) tell_defined(data, size); /* also where nothing is set */
    if (start >= chunk->dirty) return;
    size_t dirty = chunk->dirty - start;
    memset(data, 0, size < dirty ? size : dirty);
}

void *arena_alloc(arena_tick *tick, size_t size) {
    arena__chunk *chunk;
    tick = arena__pick(tick);
    if (ARENA__UNLIKELY(!tick)) return arena__persist_new(size, true);
    return arena__alloc_in(tick, size, &chunk);
}

void *arena_zalloc(arena_tick *tick, size_t size) {
    arena__chunk *chunk;
    tick = arena__pick(tick);
    void *data = tick ? arena__alloc_in(tick, size, &chunk) : arena__persist_new(size, true);
    if (!data) return NULL;
    if (tick)
        arena__zero(chunk, data, size);
    else
        memset(data, 0, size);
    return data;
}

/* The chunk that a block lies in, when it is one that the block could grow in. */
static arena__chunk *chunk_of(const arena_tick *tick, const char *data, size_t size) {
    if (data + (size ? arena__round(size) : ARENA__ALIGN) == tick->pos) return tick->current;
    if (size <= ARENA__CHUNK_MIN / 4) return NULL; /* never alone */
    for (arena__chunk *chunk = tick->chunks; chunk; chunk = chunk->next)
        if (chunk->alone && data == (char *)chunk + ARENA__HEAD) return chunk;
    return NULL;
}

void *arena_realloc(arena_tick *tick, void *old, size_t old_size, size_t size) {
    tick = arena__pick(tick);
    if (!old) return arena_alloc(tick, size);
    if (!tick) { /* a stray: where the old block came from is not known, so it is left alone */
        void *data = arena__persist_new(size, true);
        if (data) memcpy(data, old, old_size < size ? old_size : size);
        return data;
    }
    if (size <= old_size) {
        if (arena__may_change(tick) != ARENA_OK) return NULL;
        arena__refund(tick, old_size - size);
        return old;
    }
    if (arena__claim(tick, size - old_size) != ARENA_OK) return NULL;
    arena__chunk *chunk = chunk_of(tick, old, old_size);
    bool fits = arena__round(size) == arena__round(old_size);
    if (fits && arena__checked()) arena__check_grown(tick, old, old_size, size);
    if (!fits && (!chunk || !arena__extend(tick, chunk, old, old_size, size))) {
        arena__chunk *fresh;
        void *data = arena__take(tick, size, &fresh);
        if (!data) {
            arena__refund(tick, size - old_size);
            arena__fail(ARENA_E_NOMEM);
            return NULL;
        }
        memcpy(data, old, old_size);
        if (chunk && chunk->alone) arena__chunk_drop(tick, chunk);
        old = data;
    }
    return old;
}

void *arena_memdup(arena_tick *tick, const void *data, size_t size) {
    void *copy = arena_alloc(tick, size);
    if (copy && size) memcpy(copy, data, size);
    return copy;
}

char *arena_strndup(arena_tick *tick, const char *text, size_t size) {
    size_t length = strnlen(text, size);
    char *copy = arena_alloc(tick, length + 1);
    if (!copy) return NULL;
    memcpy(copy, text, length);
    copy[length] = '\0';
    return copy;
}

char *arena_strdup(arena_tick *tick, const char *text) {
    return arena_memdup(tick, text, strlen(text) + 1);
}

/* Measured first and then printed: printing straight into the chunk's rest would soil bytes that
 * count as zeroed. */
char *arena_vprintf(arena_tick *tick, const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, args);
    char *text = NULL;
    if (length < 0)
        arena__fail(ARENA_E_INVALID);
    else
        text = arena_alloc(tick, (size_t)length + 1);
    if (text) (void)vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}

char *arena_printf(arena_tick *tick, const char *format, ...) {
    va_list args;
    va_start(args, format);
    char *text = arena_vprintf(tick, format, args);
    va_end(args);
    return text;
}
