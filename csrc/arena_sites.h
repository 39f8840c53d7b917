/* arena_sites.h: the macro form of the API, for files that define ARENA_SITES before arena.h. Each call
 * that begins, ends or allocates notes where it stands. The arguments are worked out before the place
 * is noted, for there may be such calls among them.
 */
#ifndef ARENA_SITES_H
#define ARENA_SITES_H

#define ARENA__HERE const char *file_, int line_, const char *function_

static inline arena_tick *arena__begin_at(ARENA__HERE, const char *name) {
    arena_at(file_, line_, function_);
    return arena_begin(name);
}

static inline int arena__end_at(ARENA__HERE, arena_tick *tick) {
    arena_at(file_, line_, function_);
    return arena_end(tick);
}

static inline void *arena__alloc_at(ARENA__HERE, arena_tick *tick, size_t size) {
    arena_at(file_, line_, function_);
    return arena_alloc(tick, size);
}

static inline void *arena__zalloc_at(ARENA__HERE, arena_tick *tick, size_t size) {
    arena_at(file_, line_, function_);
    return arena_zalloc(tick, size);
}

static inline void *arena__realloc_at(ARENA__HERE, arena_tick *tick, void *old, size_t old_size, size_t size) {
    arena_at(file_, line_, function_);
    return arena_realloc(tick, old, old_size, size);
}

static inline void *arena__memdup_at(ARENA__HERE, arena_tick *tick, const void *data, size_t size) {
    arena_at(file_, line_, function_);
    return arena_memdup(tick, data, size);
}

static inline char *arena__strdup_at(ARENA__HERE, arena_tick *tick, const char *text) {
    arena_at(file_, line_, function_);
    return arena_strdup(tick, text);
}

static inline char *arena__strndup_at(ARENA__HERE, arena_tick *tick, const char *text, size_t size) {
    arena_at(file_, line_, function_);
    return arena_strndup(tick, text, size);
}

static inline arena_strbuf *arena__strbuf_new_at(ARENA__HERE, arena_tick *tick, size_t capacity) {
    arena_at(file_, line_, function_);
    return arena_strbuf_new(tick, capacity);
}

static inline void *arena__alloc_persist_at(ARENA__HERE, size_t size) {
    arena_at(file_, line_, function_);
    return arena_alloc_persist(size);
}

static inline void *arena__zalloc_persist_at(ARENA__HERE, size_t size) {
    arena_at(file_, line_, function_);
    return arena_zalloc_persist(size);
}

static inline void *arena__realloc_persist_at(ARENA__HERE, void *old, size_t size) {
    arena_at(file_, line_, function_);
    return arena_realloc_persist(old, size);
}

static inline void *arena__memdup_persist_at(ARENA__HERE, const void *data, size_t size) {
    arena_at(file_, line_, function_);
    return arena_memdup_persist(data, size);
}

static inline char *arena__strdup_persist_at(ARENA__HERE, const char *text) {
    arena_at(file_, line_, function_);
    return arena_strdup_persist(text);
}

static inline char *arena__strndup_persist_at(ARENA__HERE, const char *text, size_t size) {
    arena_at(file_, line_, function_);
    return arena_strndup_persist(text, size);
}

static inline arena_strbuf *arena__strbuf_new_persist_at(ARENA__HERE, size_t capacity) {
    arena_at(file_, line_, function_);
    return arena_strbuf_new_persist(capacity);
}

#if defined(__GNUC__)
__attribute__((format(printf, 5, 6), unused))
#endif
static char *arena__printf_at(ARENA__HERE, arena_tick *tick, const char *format, ...) {
    va_list args;
    arena_at(file_, line_, function_);
    va_start(args, format);
    char *text = arena_vprintf(tick, format, args);
    va_end(args);
    return text;
}

#if defined(__GNUC__)
__attribute__((format(printf, 4, 5), unused))
#endif
static char *arena__printf_persist_at(ARENA__HERE, const char *format, ...) {
    va_list args;
    arena_at(file_, line_, function_);
    va_start(args, format);
    char *text = arena_vprintf_persist(format, args);
    va_end(args);
    return text;
}

#undef ARENA__HERE
#define ARENA__HERE __FILE__, __LINE__, __func__
#define arena_begin(...) arena__begin_at(ARENA__HERE, __VA_ARGS__)
#define arena_end(...) arena__end_at(ARENA__HERE, __VA_ARGS__)
#define arena_alloc(...) arena__alloc_at(ARENA__HERE, __VA_ARGS__)
#define arena_zalloc(...) arena__zalloc_at(ARENA__HERE, __VA_ARGS__)
#define arena_realloc(...) arena__realloc_at(ARENA__HERE, __VA_ARGS__)
#define arena_memdup(...) arena__memdup_at(ARENA__HERE, __VA_ARGS__)
#define arena_strdup(...) arena__strdup_at(ARENA__HERE, __VA_ARGS__)
#define arena_strndup(...) arena__strndup_at(ARENA__HERE, __VA_ARGS__)
#define arena_strbuf_new(...) arena__strbuf_new_at(ARENA__HERE, __VA_ARGS__)
#define arena_alloc_persist(...) arena__alloc_persist_at(ARENA__HERE, __VA_ARGS__)
#define arena_zalloc_persist(...) arena__zalloc_persist_at(ARENA__HERE, __VA_ARGS__)
#define arena_realloc_persist(...) arena__realloc_persist_at(ARENA__HERE, __VA_ARGS__)
#define arena_memdup_persist(...) arena__memdup_persist_at(ARENA__HERE, __VA_ARGS__)
#define arena_strdup_persist(...) arena__strdup_persist_at(ARENA__HERE, __VA_ARGS__)
#define arena_strndup_persist(...) arena__strndup_persist_at(ARENA__HERE, __VA_ARGS__)
#define arena_strbuf_new_persist(...) arena__strbuf_new_persist_at(ARENA__HERE, __VA_ARGS__)
#define arena_printf(...) arena__printf_at(ARENA__HERE, __VA_ARGS__)
#define arena_printf_persist(...) arena__printf_persist_at(ARENA__HERE, __VA_ARGS__)

#endif
