/* shim.c: makes the n-th allocation or mapping of one shared object fail. Loaded by LD_PRELOAD; the
 * test sets the range of addresses that the object's code lies in, and n, through ctypes.
 *
 * Every other call goes through untouched: the interpreter has memory when the core has none. What
 * the object was given is also kept in a table, so that the test can compare what really lives with
 * what the counters say. glibc only; the callers hold the GIL, so nothing here needs a lock.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);

static uintptr_t low, high;          /* the watched code */
static long from = -1, until = -1;   /* the calls that fail: from <= number < until */
static long calls, failed;

#define MOST 65536 /* things that live at the same time; a test has some dozens */
static struct {
    void *start;
    size_t size; /* of a mapping; 0: from malloc */
} live[MOST];
static size_t live_count, live_maps, live_map_bytes, live_mallocs;

static void remember(void *start, size_t size) {
    if (live_count == MOST) abort();
    live[live_count].start = start;
    live[live_count++].size = size;
    if (size)
        live_maps++, live_map_bytes += size;
    else
        live_mallocs++;
}

static void forget(const void *start) {
    for (size_t i = live_count; i-- > 0;) {
        if (live[i].start != start) continue;
        if (live[i].size)
            live_maps--, live_map_bytes -= live[i].size;
        else
            live_mallocs--;
        live[i] = live[--live_count];
        return;
    }
}

static bool watched(const void *caller) {
    return (uintptr_t)caller >= low && (uintptr_t)caller < high;
}

static bool fails(void) {
    long number = calls++;
    if (from < 0 || number < from || number >= until) return false;
    failed++;
    errno = ENOMEM;
    return true;
}

#define CALLER __builtin_return_address(0)

void *malloc(size_t size) {
    if (!watched(CALLER)) return __libc_malloc(size);
    void *data = fails() ? NULL : __libc_malloc(size);
    if (data) remember(data, 0);
    return data;
}

void *calloc(size_t count, size_t size) {
    if (!watched(CALLER)) return __libc_calloc(count, size);
    void *data = fails() ? NULL : __libc_calloc(count, size);
    if (data) remember(data, 0);
    return data;
}

void *realloc(void *old, size_t size) {
    if (!watched(CALLER)) {
        forget(old);
        return __libc_realloc(old, size);
    }
    void *data = fails() ? NULL : __libc_realloc(old, size);
    if (data) {
        forget(old);
        remember(data, 0);
    }
    return data;
}

void free(void *data) {
    forget(data);
    __libc_free(data);
}

static void *map(void *start, size_t size, int prot, int flags, int fd, off_t offset, bool ours) {
    if (ours && fails()) return MAP_FAILED;
    void *data = (void *)syscall(SYS_mmap, start, size, prot, flags, fd, offset);
    if (ours && data != MAP_FAILED) remember(data, size);
    return data;
}

void *mmap(void *start, size_t size, int prot, int flags, int fd, off_t offset) {
    return map(start, size, prot, flags, fd, offset, watched(CALLER));
}

void *mmap64(void *start, size_t size, int prot, int flags, int fd, off_t offset) {
    return map(start, size, prot, flags, fd, offset, watched(CALLER));
}

void *mremap(void *old, size_t old_size, size_t size, int flags, ...) {
    void *to = NULL;
    if (flags & MREMAP_FIXED) {
        va_list args;
        va_start(args, flags);
        to = va_arg(args, void *);
        va_end(args);
    }
    bool ours = watched(CALLER);
    if (ours && fails()) return MAP_FAILED;
    void *data = (void *)syscall(SYS_mremap, old, old_size, size, flags, to);
    if (ours && data != MAP_FAILED) {
        forget(old);
        remember(data, size);
    }
    return data;
}

/* The core's munmap is a tail call, whose return address is anybody's: the table knows better. */
int munmap(void *start, size_t size) {
    forget(start);
    return (int)syscall(SYS_munmap, start, size);
}

void shim_watch(uintptr_t start, uintptr_t end) {
    low = start;
    high = end;
}

void shim_arm(long first, long end) {
    calls = failed = 0;
    from = first;
    until = end;
}

long shim_calls(void) {
    return calls;
}

long shim_failed(void) {
    return failed;
}

size_t shim_live_maps(void) {
    return live_maps;
}

size_t shim_live_map_bytes(void) {
    return live_map_bytes;
}

size_t shim_live_mallocs(void) {
    return live_mallocs;
}
