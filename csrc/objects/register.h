/* register.h: what cffi exposes of the objects module, for arena/objects.py and for tests. */
#ifndef ARENA_OBJECTS_REGISTER_H
#define ARENA_OBJECTS_REGISTER_H

#include <stdint.h>

/* cdef begin */

/* Bytes, unless the name says otherwise. */
typedef struct arena_objects_stats {
    uint64_t open_count;     /* ticks that capture */
    uint64_t captured;       /* blocks of open ticks, as asked for */
    uint64_t captured_count;
    uint64_t escaped;        /* blocks that have outlived their tick, as asked for */
    uint64_t escaped_count;
    uint64_t spans;          /* what the blocks lie in */
    uint64_t cached;         /* free spans that hold memory for the next ticks */
    uint64_t given_back;     /* ever, to the operating system */
    uint64_t reserved;       /* addresses */
} arena_objects_stats;

/* The version of the package that this module was built with. */
const char *arena_objects_version(void);

/* Hooks CPython's allocators, the first time, and takes the host's table (struct arena_link_host; NULL:
 * nobody is told anything). 0; -1 when the table is of another version; -2 when the hooks cannot be
 * set; -3 when a tick that captures is open and the host is to be another one. A new host knows none
 * of the rows of the one before: of what has escaped until then it hears nothing. Never undone. */
int arena_objects_connect(const void *host);

/* What was last connected: NULL at first. */
const void *arena_objects_host(void);

/* The table for the main module, struct arena_link_objects; NULL before the first connect. */
const void *arena_objects_table(void);

/* A function uint32_t (uintptr_t *key, uint32_t depth) that reads the running Python code: see
 * stack.c. NULL where the frames of this CPython are not known. */
const void *arena_objects_walker(void);

void arena_objects_stats_get(arena_objects_stats *out);

/* Gives back memory that holds no block: at most so many free spans of 64 KiB, and when there are none
 * the whole pages between blocks. Returns bytes; 0 when there is nothing more. */
uint64_t arena_objects_trim(uint32_t spans);

/* 1 when a call through `lib` keeps the GIL, which all of these need; 0 when not. */
int arena_objects_gil_held(void);

/* cdef end */

#endif
