/* link.h: what the main module (arena._native) and the objects module (arena._objects) lend each
 * other. They are two shared objects that cannot link to each other's functions: each fills a table,
 * and arena/objects.py hands the addresses over once, at the first tick with objects=True.
 *
 * Every function here is called with the GIL held, and may be called with an exception set, which
 * stays as it is.
 */
#ifndef ARENA_OBJECTS_LINK_H
#define ARENA_OBJECTS_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARENA_LINK_VERSION 1

/* Lent by arena._native. None of these runs Python code or starts the collector. */
typedef struct arena_link_host {
    int version;
    /* The site of the Python code that this thread runs: a number for the stack above it, as deep as
     * the tick records it; 0 when it is not known. `tick` is what begin() was given. May allocate
     * Python objects of less than 512 bytes. */
    uint32_t (*site)(const void *tick);
    /* A block of the tick has outlived it: it joins its row of the map of escapes. Returns the row's
     * number, 0 when there is no memory for one. */
    uint32_t (*escaped)(const void *tick, uint32_t site, size_t size);
    /* An escaped block has gone, or has another size from now on. Row 0 is ignored. */
    void (*gone)(uint32_t row, size_t size);
    void (*resized)(uint32_t row, size_t old_size, size_t size);
    /* Whether the row wants a text that shows what such a block is, and the text (UTF-8, any length:
     * it is cut). */
    bool (*wants_example)(uint32_t row);
    void (*example)(uint32_t row, const char *text, size_t size);
} arena_link_host;

/* Lent by arena._objects. */
typedef struct arena_link_objects {
    int version;
    /* From now on blocks of this thread are captured for the tick. NULL with an exception set. */
    void *(*begin)(const void *tick);
    /* The tick ends, in whichever order and thread (but capture is for the thread of the begin): what
     * is still alive of it has escaped and is told to the host. Never fails. Returns how many blocks
     * escaped. */
    size_t (*end)(void *capture);
} arena_link_objects;

#endif
