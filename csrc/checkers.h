/* checkers.h: what memory checkers are told about the memory that ticks hand out.
 *
 * AddressSanitizer (when the core is compiled with it) and Valgrind's memcheck (always compiled in)
 * know malloc, but not what lies inside of a mapping. They are told here, so that C code which
 * touches a dead tick, or a byte past the end of a block, is stopped as if the block were malloc's.
 *
 * Without such a tool nothing of it runs: arena__checked() is a global that stays false, and where it
 * is true each tick is strict, so that every allocation passes the slow path that does the telling.
 * ARENA_UNCHECKED=1 in the environment leaves it false, so that a checker can look at the fast paths.
 *
 * Valgrind is reached by its client requests: a few instructions that do nothing on a processor, and
 * that it recognises when it runs the program. They are spelled out here for the two processors we
 * know, so that no header of Valgrind is needed to build.
 */
#ifndef ARENA_CHECKERS_H
#define ARENA_CHECKERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__)
#define ARENA__ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA__ASAN 1
#endif
#endif
#ifdef ARENA__ASAN
void __asan_poison_memory_region(const volatile void *start, size_t size);
void __asan_unpoison_memory_region(const volatile void *start, size_t size);
void __lsan_register_root_region(const void *start, size_t size);
#endif

enum {
    ARENA__VG_RUNNING = 0x1001,
    ARENA__VG_CREATE_POOL = 0x1303,
    ARENA__VG_DESTROY_POOL = 0x1304,
    ARENA__VG_POOL_ALLOC = 0x1305,
    ARENA__VG_POOL_FREE = 0x1306,
    ARENA__VG_POOL_CHANGE = 0x1309,
    ARENA__VG_NOACCESS = 0x4d430000, /* "MC" */
    ARENA__VG_UNDEFINED = 0x4d430001,
    ARENA__VG_DEFINED = 0x4d430002
};

__attribute__((noinline, cold, unused)) static uintptr_t arena__valgrind(uintptr_t request,
                                                                         uintptr_t a, uintptr_t b,
                                                                         uintptr_t c, uintptr_t d) {
    volatile uintptr_t arguments[6] = {request, a, b, c, d, 0};
    uintptr_t result = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    __asm__ volatile("rolq $3, %%rdi\n\trolq $13, %%rdi\n\trolq $61, %%rdi\n\trolq $51, %%rdi\n\t"
                     "xchgq %%rbx, %%rbx"
                     : "+d"(result)
                     : "a"(&arguments[0])
                     : "cc", "memory");
#elif defined(__aarch64__) && defined(__GNUC__)
    register volatile uintptr_t *in __asm__("x4") = arguments;
    register uintptr_t out __asm__("x3") = 0;
    __asm__ volatile("ror x12, x12, #3\n\tror x12, x12, #13\n\tror x12, x12, #51\n\t"
                     "ror x12, x12, #61\n\torr x10, x10, x10"
                     : "+r"(out)
                     : "r"(in)
                     : "cc", "memory");
    result = out;
#else
    (void)arguments;
#endif
    return result;
}

/* Set once, when the library is loaded. */
extern bool arena__on_valgrind;
extern bool arena__checking;

static inline bool arena__checked(void) {
    return __builtin_expect(arena__checking, 0);
}

/* Nobody may touch these bytes. */
static inline void arena__check_shut(const void *start, size_t size) {
#ifdef ARENA__ASAN
    __asan_poison_memory_region(start, size);
#endif
    if (arena__on_valgrind) arena__valgrind(ARENA__VG_NOACCESS, (uintptr_t)start, size, 0, 0);
}

/* The library itself is about to write or give back these bytes, or they stay readable. */
static inline void arena__check_open(const void *start, size_t size) {
#ifdef ARENA__ASAN
    __asan_unpoison_memory_region(start, size);
#endif
    if (arena__on_valgrind) arena__valgrind(ARENA__VG_DEFINED, (uintptr_t)start, size, 0, 0);
}

/* What lies here points to memory that is still needed. */
static inline void arena__check_root(const void *start, size_t size) {
#ifdef ARENA__ASAN
    __lsan_register_root_region(start, size);
#else
    (void)start, (void)size;
#endif
}

/* A pool holds the pieces of one tick. */
static inline void arena__check_pool_begin(const void *pool) {
    if (arena__on_valgrind) arena__valgrind(ARENA__VG_CREATE_POOL, (uintptr_t)pool, 0, 0, 0);
}

static inline void arena__check_pool_end(const void *pool) {
    if (arena__on_valgrind) arena__valgrind(ARENA__VG_DESTROY_POOL, (uintptr_t)pool, 0, 0, 0);
}

/* Memory is handed out: these bytes, and not those behind them. */
static inline void arena__check_piece(const void *pool, const void *data, size_t size) {
#ifdef ARENA__ASAN
    __asan_unpoison_memory_region(data, size);
#endif
    if (arena__on_valgrind)
        arena__valgrind(ARENA__VG_POOL_ALLOC, (uintptr_t)pool, (uintptr_t)data, size, 0);
}

/* A piece has grown where it lies. */
static inline void arena__check_grown(const void *pool, const void *data, size_t old_size,
                                      size_t size) {
#ifdef ARENA__ASAN
    __asan_unpoison_memory_region(data, size);
#endif
    if (!arena__on_valgrind) return;
    arena__valgrind(ARENA__VG_POOL_CHANGE, (uintptr_t)pool, (uintptr_t)data, (uintptr_t)data, size);
    if (size > old_size)
        arena__valgrind(ARENA__VG_UNDEFINED, (uintptr_t)data + old_size, size - old_size, 0, 0);
}

/* A piece goes before its tick does. */
static inline void arena__check_gone(const void *pool, const void *data) {
    if (arena__on_valgrind)
        arena__valgrind(ARENA__VG_POOL_FREE, (uintptr_t)pool, (uintptr_t)data, 0, 0);
}

#endif
