/* strbuf.c: growing strings.
 *
 * A string grows where it lies when nothing was allocated behind it, which in a loop that builds
 * one string at a time is nearly always; else it moves and doubles. It is charged by its length and
 * not by its capacity: so a limit is exact to the byte, whatever the growth policy does.
 */
#include "internal.h"

#include <stdio.h>

#define FIRST_CAPACITY 239 /* with the NUL a round span */

void arena__strbuf_init(arena_strbuf *buf, arena_tick *tick) {
    *buf = (arena_strbuf){.tick = tick};
}

static int grow_persisted(arena_strbuf *buf, size_t cap) {
    char *data = buf->data ? arena__persist_resize(buf->data, cap + 1)
                           : arena__persist_part(cap + 1, buf->stray, buf->row);
    if (!data) return arena_error();
    if (!buf->data) data[0] = '\0';
    buf->data = data;
    buf->cap = cap;
    return ARENA_OK;
}

static int grow_scratch(arena_strbuf *buf, size_t cap) {
    arena_tick *tick = buf->tick;
    if (buf->data) {
        if (arena__extend(tick, buf->chunk, buf->data, buf->cap + 1, cap + 1)) {
            buf->cap = cap;
            return ARENA_OK;
        }
        if (buf->chunk->alone) {
            arena__chunk *moved = arena__chunk_resize(tick, buf->chunk, cap + 1);
            if (moved) {
                moved->extent = moved->size;
                buf->chunk = moved;
                buf->data = (char *)moved + ARENA__HEAD;
                buf->cap = moved->size - ARENA__HEAD - 1;
                return ARENA_OK;
            }
        }
    }
    arena__chunk *chunk;
    char *data = arena__take(tick, cap + 1, &chunk);
    if (!data) return arena__fail(ARENA_E_NOMEM);
    if (chunk->alone) { /* all of it is this string's */
        size_t asked = cap + 1;
        chunk->extent = chunk->size;
        cap = chunk->size - ARENA__HEAD - 1;
        if (arena__checked()) arena__check_grown(tick, data, asked, cap + 1);
    }
    data[0] = '\0';
    if (buf->data) {
        memcpy(data, buf->data, buf->len + 1);
        if (buf->chunk->alone) arena__chunk_drop(tick, buf->chunk);
    }
    buf->data = data;
    buf->cap = cap;
    buf->chunk = chunk;
    return ARENA_OK;
}

/* Capacity for `extra` more bytes. */
int arena__strbuf_grow(arena_strbuf *buf, size_t extra) {
    if (extra > ARENA__UNLIMITED - buf->len) return arena__fail(ARENA_E_NOMEM);
    size_t need = buf->len + extra;
    if (buf->data && need <= buf->cap) return ARENA_OK;
    size_t cap = FIRST_CAPACITY;
    if (buf->tick) {
        if (buf->cap >= FIRST_CAPACITY) cap = buf->cap * 2 + 1;
    } else if (!buf->data) {
        cap = need; /* a copy: most never grow again */
    } else if (buf->cap >= FIRST_CAPACITY) {
        cap = buf->cap + buf->cap / 4; /* what is spare here is spare for as long as it lives */
    }
    if (cap < need) cap = need;
    int code = buf->tick ? grow_scratch(buf, cap) : grow_persisted(buf, cap);
    /* Room to grow may be what did not fit; what was asked for still may. */
    if (code != ARENA_OK && cap > need)
        code = buf->tick ? grow_scratch(buf, need) : grow_persisted(buf, need);
    return code;
}

/* Room for `extra` more bytes, which are counted as asked for. */
static int claim(arena_strbuf *buf, size_t extra) {
    int code = buf->tick ? arena__claim(buf->tick, extra) : ARENA_OK;
    if (code != ARENA_OK) return code;
    code = arena__strbuf_grow(buf, extra);
    if (code != ARENA_OK && buf->tick) arena__refund(buf->tick, extra);
    return code;
}

ARENA__NOINLINE int arena__strbuf_append_slow(arena_strbuf *buf, const void *data, size_t size) {
    /* The bytes may lie inside the string, which may move. */
    uintptr_t start = (uintptr_t)buf->data, from = (uintptr_t)data;
    bool inside = buf->data && from >= start && from - start <= buf->len;
    int code = claim(buf, size);
    if (code != ARENA_OK) return code;
    if (inside) data = buf->data + (from - start);
    if (size) memcpy(buf->data + buf->len, data, size);
    buf->len += size;
    buf->data[buf->len] = '\0';
    return ARENA_OK;
}

/* Frees a persisted string's data; scratch goes with its tick. */
void arena__strbuf_free(arena_strbuf *buf) {
    if (!buf->tick) arena_free_persist(buf->data);
    *buf = (arena_strbuf){.tick = NULL};
}

arena_strbuf *arena_strbuf_new(arena_tick *tick, size_t capacity) {
    tick = arena__pick(tick);
    if (!tick) return arena__persist_strbuf(capacity, true);
    if (arena__may_change(tick) != ARENA_OK) return NULL;
    arena__chunk *chunk;
    arena_strbuf *buf = arena__take(tick, sizeof *buf, &chunk);
    if (!buf) {
        arena__fail(ARENA_E_NOMEM);
        return NULL;
    }
    arena__strbuf_init(buf, tick);
    if (capacity && arena__strbuf_grow(buf, capacity) != ARENA_OK) return NULL;
    return buf;
}

int arena_strbuf_append(arena_strbuf *buf, const void *data, size_t size) {
    return arena__strbuf_append(buf, data, size);
}

int arena_strbuf_puts(arena_strbuf *buf, const char *text) {
    return arena__strbuf_append(buf, text, strlen(text));
}

int arena_strbuf_printf(arena_strbuf *buf, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (length < 0) return arena__fail(ARENA_E_INVALID);
    size_t size = (size_t)length;
    int code = claim(buf, size);
    if (code != ARENA_OK) return code;
    va_start(args, format);
    (void)vsnprintf(buf->data + buf->len, size + 1, format, args);
    va_end(args);
    buf->len += size;
    return ARENA_OK;
}

char *arena_strbuf_data(const arena_strbuf *buf) {
    static char empty[1];
    return buf->data ? buf->data : empty;
}

size_t arena_strbuf_len(const arena_strbuf *buf) {
    return buf->len;
}

int arena_strbuf_truncate(arena_strbuf *buf, size_t size) {
    if (size > buf->len) return arena__fail(ARENA_E_INVALID);
    if (buf->tick) {
        int code = arena__may_change(buf->tick);
        if (code != ARENA_OK) return code;
        arena__refund(buf->tick, buf->len - size);
    }
    if (size < buf->len) {
        buf->len = size;
        buf->data[size] = '\0';
    }
    return ARENA_OK;
}

int arena_strbuf_clear(arena_strbuf *buf) {
    return arena_strbuf_truncate(buf, 0);
}
