/* debug.c: the dial that makes C code which touches a dead tick show itself, at run time. What the
 * flags do is in pages.c, where memory ends. */
#include "internal.h"

#include <stdlib.h>

_Atomic int arena__debug_flags;
bool arena__on_valgrind, arena__checking;

static const struct {
    const char *word;
    int flag;
} WORDS[] = {
    {"fill", ARENA_DEBUG_FILL},
    {"noreuse", ARENA_DEBUG_NOREUSE},
    {"guard", ARENA_DEBUG_GUARD},
};
enum { COUNT = sizeof WORDS / sizeof *WORDS };

/* "sites=8" is the depth of arena_trace; -1 when the word is none, or too deep. */
static int sites_of(const char *word, size_t length) {
    static const char start[] = "sites=";
    size_t known = sizeof start - 1;
    if (length <= known || length > known + 2 || memcmp(word, start, known) != 0) return -1;
    if (strspn(word + known, "0123456789") < length - known) return -1;
    int depth = atoi(word + known);
    return depth <= ARENA__DEPTH ? depth : -1;
}

int arena_debug_words(const char *words) {
    int flags = 0;
    if (!words) return 0;
    while (*words) {
        words += strspn(words, " ");
        size_t length = strcspn(words, ","), named = length, i = 0;
        while (named && words[named - 1] == ' ') named--;
        while (i < COUNT &&
               (strlen(WORDS[i].word) != named || memcmp(WORDS[i].word, words, named) != 0))
            i++;
        if (i < COUNT)
            flags |= WORDS[i].flag;
        else if (sites_of(words, named) < 0)
            return arena__fail(ARENA_E_INVALID);
        words += length;
        if (*words == ',' && *++words == '\0') return arena__fail(ARENA_E_INVALID);
    }
    return flags;
}

/* The depth that such a text asks for. */
static int sites_in(const char *words) {
    int depth = 0;
    for (; words && *words; words += *words == ',') {
        words += strspn(words, " ");
        size_t length = strcspn(words, ", ");
        int asked = sites_of(words, length);
        if (asked >= 0) depth = asked;
        words += strcspn(words, ",");
    }
    return depth;
}

/* What ARENA_TRACE says: 0 for nothing or "", ARENA_E_INVALID when it makes no sense. */
int arena_trace_words(const char *words) {
    if (!words || !*words) return 0;
    size_t digits = strspn(words, "0123456789");
    int depth = digits == strlen(words) && digits < 4 ? atoi(words) : -1;
    return depth >= 0 && depth <= ARENA__DEPTH ? depth : arena__fail(ARENA_E_INVALID);
}

int arena_debug_now(void) {
    return ARENA__LOAD(arena__debug_flags);
}

int arena_debug(int flags) {
    const int all = ARENA_DEBUG_FILL | ARENA_DEBUG_NOREUSE | ARENA_DEBUG_GUARD;
    if (flags & ~all) return arena__fail(ARENA_E_INVALID);
    /* What is cached was ended before: it is given back, and not used again. */
    if (flags & (ARENA_DEBUG_NOREUSE | ARENA_DEBUG_GUARD)) (void)arena_trim(0);
    return atomic_exchange(&arena__debug_flags, flags);
}

/* Before anybody can have begun a tick. A text that makes no sense turns nothing on: nobody is there
 * to be told, and arena's Python side asks again and tells. */
__attribute__((constructor)) static void set_up(void) {
    if (!getenv("ARENA_UNCHECKED")) {
        arena__on_valgrind = arena__valgrind(ARENA__VG_RUNNING, 0, 0, 0, 0) != 0;
        arena__checking = arena__on_valgrind;
#ifdef ARENA__ASAN
        arena__checking = true;
#endif
    }
    int flags = arena_debug_words(getenv("ARENA_DEBUG"));
    if (flags > 0) ARENA__STORE(arena__debug_flags, flags);
    int depth = arena_trace_words(getenv("ARENA_TRACE"));
    size_t budget = arena_audit_words(getenv("ARENA_AUDIT"));
    if (flags >= 0 && depth == 0) depth = sites_in(getenv("ARENA_DEBUG"));
    if (depth > 0) (void)arena_trace(depth);
    if (budget && budget != SIZE_MAX) (void)arena_audit(budget);
}
