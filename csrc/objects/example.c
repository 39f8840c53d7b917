/* example.c: a text that shows what a block is.
 *
 * It looks at the block's own bytes and follows no pointer, for the block may be anything, also bytes
 * that somebody made look like an object. When it begins as an object of a type whose layout is known
 * does, with or without what the collector keeps in front of it, that is told; and what would lie
 * outside of the block is not read.
 */
#include "objects.h"

#include <stdio.h>

enum { SHOWN = 40 }; /* characters */

typedef struct text {
    char *at;
    size_t room;
} text;

static void put(text *to, const char *bytes, size_t size) {
    if (size > to->room) size = to->room;
    memcpy(to->at, bytes, size);
    to->at += size;
    to->room -= size;
}

static void put_text(text *to, const char *bytes) {
    put(to, bytes, strlen(bytes));
}

/* With commas: 1,234,567. */
static void put_number(text *to, size_t number) {
    char digits[32];
    int length = snprintf(digits, sizeof digits, "%zu", number);
    for (int i = 0; i < length; i++) {
        if (i && (length - i) % 3 == 0) put(to, ",", 1);
        put(to, digits + i, 1);
    }
}

static void put_character(text *to, uint32_t c) {
    char utf8[4];
    if (c == '\n') {
        put_text(to, "\\n");
    } else if (c == '\t') {
        put_text(to, "\\t");
    } else if (c == '\'' || c == '\\') {
        put(to, "\\", 1);
        put(to, (char[]){(char)c}, 1);
    } else if (c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0xd800 && c < 0xe000) || c > 0x10ffff) {
        put(to, "?", 1);
    } else if (c < 0x80) {
        put(to, (char[]){(char)c}, 1);
    } else if (c < 0x800) {
        utf8[0] = (char)(0xc0 | c >> 6), utf8[1] = (char)(0x80 | (c & 0x3f));
        put(to, utf8, 2);
    } else if (c < 0x10000) {
        utf8[0] = (char)(0xe0 | c >> 12), utf8[1] = (char)(0x80 | (c >> 6 & 0x3f));
        utf8[2] = (char)(0x80 | (c & 0x3f));
        put(to, utf8, 3);
    } else {
        utf8[0] = (char)(0xf0 | c >> 18), utf8[1] = (char)(0x80 | (c >> 12 & 0x3f));
        utf8[2] = (char)(0x80 | (c >> 6 & 0x3f)), utf8[3] = (char)(0x80 | (c & 0x3f));
        put(to, utf8, 4);
    }
}

static uint32_t character(const char *data, size_t index, unsigned kind) {
    uint16_t two;
    uint32_t four;
    if (kind == 1) return (unsigned char)data[index];
    if (kind == 2) {
        memcpy(&two, data + 2 * index, 2);
        return two;
    }
    memcpy(&four, data + 4 * index, 4);
    return four;
}

static void put_characters(text *to, const char *data, size_t length, unsigned kind) {
    size_t shown = length < SHOWN ? length : SHOWN;
    for (size_t i = 0; i < shown; i++) put_character(to, character(data, i, kind));
    put_text(to, shown < length ? "…'" : "'");
}

static bool put_str(text *to, const char *block, size_t size) {
    PyCompactUnicodeObject header;
    if (size < sizeof header) return false;
    memcpy(&header, block, sizeof header);
    const PyASCIIObject *ascii = &header._base;
    unsigned kind = ascii->state.kind;
    size_t head = ascii->state.ascii ? sizeof(PyASCIIObject) : sizeof(PyCompactUnicodeObject);
    if (!ascii->state.compact || ascii->length < 0 || (kind != 1 && kind != 2 && kind != 4))
        return false;
    size_t length = (size_t)ascii->length;
    if (length > (size - head) / kind) return false;
    put_text(to, "str '");
    put_characters(to, block + head, length, kind);
    return true;
}

static bool put_bytes(text *to, const char *block, size_t size) {
    PyVarObject header;
    size_t head = offsetof(PyBytesObject, ob_sval);
    memcpy(&header, block, sizeof header);
    if (header.ob_size < 0 || (size_t)header.ob_size > size - head) return false;
    put_text(to, "bytes b'");
    put_characters(to, block + head, (size_t)header.ob_size, 1);
    return true;
}

static bool put_tuple(text *to, const char *block, size_t size) {
    PyVarObject header;
    size_t head = offsetof(PyTupleObject, ob_item);
    memcpy(&header, block, sizeof header);
    if (header.ob_size < 0 || (size_t)header.ob_size > (size - head) / sizeof(PyObject *))
        return false;
    put_text(to, "tuple with ");
    put_number(to, (size_t)header.ob_size);
    put_text(to, " items");
    return true;
}

static const PyTypeObject *type_at(const char *block) {
    PyObject header;
    memcpy(&header, block, sizeof header);
    return header.ob_type;
}

/* Writes at most `room` bytes of UTF-8, of which the last character may be cut; returns how many. The
 * block has more than ARENA__SMALL bytes. */
size_t arena__example(const char *block, size_t size, char *into, size_t room) {
    enum { COLLECTED = 16 }; /* what the collector keeps in front of an object: two words */
    /* A copy of what is looked at, for a block may have bytes that nobody wrote yet, and checkers are
     * told that we know. */
    char start[ARENA__SMALL];
    _Static_assert(COLLECTED + sizeof(PyCompactUnicodeObject) + SHOWN * 4 <= sizeof start,
                   "a header and the characters that are shown");
    memcpy(start, block, sizeof start);
    arena__check_open(start, sizeof start);
    text to = {into, room};
    const PyTypeObject *type = type_at(start);
    bool known = (type == &PyUnicode_Type && put_str(&to, start, size)) ||
                 (type == &PyBytes_Type && put_bytes(&to, start, size)) ||
                 (type_at(start + COLLECTED) == &PyTuple_Type &&
                  put_tuple(&to, start + COLLECTED, size - COLLECTED));
    if (!known && type == &PyLong_Type) {
        put_text(&to, "int");
        known = true;
    }
    if (known) put_text(&to, ", ");
    put_number(&to, size);
    put_text(&to, " bytes");
    if (!known) put_text(&to, " (a list's or dict's table, or a buffer)");
    return room - to.room;
}
