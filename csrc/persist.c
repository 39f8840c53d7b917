/* persist.c: memory that outlives ticks, and strays.
 *
 * From malloc, with 16 bytes before the data: its size, so that the counters are exact, and its
 * kind. Chunks would be wrong here: one long-lived string would hold 64 KiB of pages.
 */
#include "internal.h"

#include <stdio.h>

typedef struct head {
    size_t size;
    uint16_t kind;   /* ARENA__PERSIST or ARENA__STRAY */
    uint16_t part; /* of a growing string: RECORD or DATA */
    uint32_t row;    /* of the map of escapes, or 0 */
} head;

enum { WHOLE = 0, RECORD = 1, DATA = 2 };

_Static_assert(sizeof(head) == 16, "the data stays aligned to 16");

static _Atomic size_t bytes, bytes_peak, stray_bytes;
static _Atomic uint64_t count, stray_count, strays_ever;

static void note_peak(size_t now) {
    size_t peak = ARENA__LOAD(bytes_peak);
    while (now > peak &&
           !atomic_compare_exchange_weak_explicit(&bytes_peak, &peak, now, memory_order_relaxed,
                                                  memory_order_relaxed))
        continue;
}

static void account(const head *h, size_t added, size_t removed) {
    if (h->kind == ARENA__STRAY) {
        ARENA__ADD(stray_bytes, added - removed);
    } else {
        note_peak(ARENA__ADD(bytes, added - removed) + added - removed);
    }
}

static head *head_of(const void *data) {
    return (head *)((uintptr_t)data - sizeof(head));
}

/* Memory for `old` (or NULL) and its header, counted against the process's limit. NULL with a code.
 * Cached chunks may be what is missing. */
static head *take(head *old, size_t old_size, size_t size) {
    if (size > old_size && arena__claim_persist(size - old_size) != ARENA_OK) return NULL;
    head *h = arena__system.resize(old, sizeof *h + size);
    if (!h && arena_trim(0)) h = arena__system.resize(old, sizeof *h + size);
    if (!h) arena__fail(ARENA_E_NOMEM);
    if (!h && size > old_size) arena__refund_persist(size - old_size);
    if (h && size < old_size) arena__refund_persist(old_size - size);
    return h;
}

static inline __attribute__((always_inline)) void *make(size_t size, bool stray, uint16_t part,
                                                         uint32_t row) {
    head *h = take(NULL, 0, size);
    if (!h) return NULL;
    *h = (head){size, stray ? ARENA__STRAY : ARENA__PERSIST, part, row};
    account(h, size, 0);
    if (stray) {
        ARENA__ADD(stray_count, 1);
        ARENA__ADD(strays_ever, 1);
    } else {
        ARENA__ADD(count, 1);
    }
    return h + 1;
}

static ARENA__NOINLINE void enter_row(head *h) {
    h->row = arena__escaped(h->kind == ARENA__STRAY ? ARENA_ESCAPE_STRAY : ARENA_ESCAPE_PERSIST, h->size);
}

void *arena__persist_new(size_t size, bool stray) {
    void *data = make(size, stray, WHOLE, 0);
    if (arena__traced() && data) enter_row(head_of(data));
    return data;
}

/* The bytes of a growing string. In the map they are in the row of the string, which counts it once. */
void *arena__persist_part(size_t size, bool stray, uint32_t row) {
    void *data = make(size, stray, DATA, row);
    if (data) arena__row_resize(row, 0, size);
    return data;
}

void *arena__persist_resize(void *old, size_t size) {
    head *h = take(head_of(old), head_of(old)->size, size);
    if (!h) return NULL;
    account(h, size, h->size);
    if (ARENA__UNLIKELY(h->row)) arena__row_resize(h->row, h->size, size);
    h->size = size;
    return h + 1;
}

arena_strbuf *arena__persist_strbuf(size_t capacity, bool stray) {
    arena_strbuf *buf = arena__persist_new(sizeof *buf, stray);
    if (!buf) return NULL;
    head_of(buf)->part = RECORD;
    arena__strbuf_init(buf, NULL);
    buf->stray = stray;
    buf->row = head_of(buf)->row;
    if (capacity && arena__strbuf_grow(buf, capacity) != ARENA_OK) {
        arena_free_persist(buf);
        return NULL;
    }
    return buf;
}

static ARENA__NOINLINE void leave_row(const head *h) {
    if (h->part == DATA)
        arena__row_resize(h->row, h->size, 0);
    else
        arena__row_sub(h->row, h->size);
}

void arena_free_persist(void *persisted) {
    if (!persisted) return;
    head *h = head_of(persisted);
    if (h->part == RECORD) arena_free_persist(((arena_strbuf *)persisted)->data);
    account(h, 0, h->size);
    if (ARENA__UNLIKELY(h->row)) leave_row(h);
    arena__refund_persist(h->size);
    if (h->kind == ARENA__STRAY)
        ARENA__SUB(stray_count, 1);
    else
        ARENA__SUB(count, 1);
    arena__system.release(h);
}

/* The row of the map that persisted memory is in, or 0. */
uint32_t arena__persist_row(const void *persisted) {
    return persisted ? head_of(persisted)->row : 0;
}

size_t arena_size_persist(const void *persisted) {
    return persisted ? head_of(persisted)->size : 0;
}

void *arena_alloc_persist(size_t size) {
    return arena__persist_new(size, false);
}

void *arena_zalloc_persist(size_t size) {
    void *data = arena__persist_new(size, false);
    if (data) memset(data, 0, size);
    return data;
}

void *arena_realloc_persist(void *old, size_t size) {
    return old ? arena__persist_resize(old, size) : arena__persist_new(size, false);
}

void *arena_memdup_persist(const void *data, size_t size) {
    void *copy = arena__persist_new(size, false);
    if (copy && size) memcpy(copy, data, size);
    return copy;
}

char *arena_strndup_persist(const char *text, size_t size) {
    size_t length = strnlen(text, size);
    char *copy = arena__persist_new(length + 1, false);
    if (!copy) return NULL;
    memcpy(copy, text, length);
    copy[length] = '\0';
    return copy;
}

char *arena_strdup_persist(const char *text) {
    return arena_memdup_persist(text, strlen(text) + 1);
}

char *arena_vprintf_persist(const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, args);
    char *text = NULL;
    if (length < 0)
        arena__fail(ARENA_E_INVALID);
    else
        text = arena__persist_new((size_t)length + 1, false);
    if (text) (void)vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}

char *arena_printf_persist(const char *format, ...) {
    va_list args;
    va_start(args, format);
    char *text = arena_vprintf_persist(format, args);
    va_end(args);
    return text;
}

arena_strbuf *arena_strbuf_new_persist(size_t capacity) {
    return arena__persist_strbuf(capacity, false);
}

void arena__persist_stats(arena_stats *out) {
    out->persisted = ARENA__LOAD(bytes);
    out->persisted_count = ARENA__LOAD(count);
    out->persisted_peak = ARENA__LOAD(bytes_peak);
    out->strays = ARENA__LOAD(stray_bytes);
    out->strays_count = ARENA__LOAD(stray_count);
    out->strays_ever = ARENA__LOAD(strays_ever);
}
