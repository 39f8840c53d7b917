/* capture.c: which tick a thread's blocks go to, and what is left of it at its end.
 *
 * Ticks end in any order, and one may be ended by another thread, so a thread's captures are a list
 * that hangs on a record of the thread, which lives for as long as any of them does.
 */
#include "objects.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

_Thread_local arena__thread *arena__self ARENA__TLS;
arena__capture *arena__by_tag[1 << 16]; /* 0 is nobody's */
arena_link_host arena__host;

static struct {
    arena__capture *spare; /* by `below` */
    uint32_t made;
    size_t open;
    pthread_key_t key;
    bool has_key;
    bool asking; /* for a site: what is allocated meanwhile stays outside */
} captures;

/* Runs without the GIL when it is a thread's end. */
static void let_go(void *data) {
    arena__thread *thread = data;
    if (atomic_fetch_sub_explicit(&thread->holders, 1, memory_order_acq_rel) == 1) free(thread);
}

/* In the child of a fork the ticks of other threads are open for ever, or until their objects are
 * collected: they do not count. Their blocks are freed as any. */
static void forked(void) {
    for (uint32_t tag = 1; tag <= captures.made; tag++) {
        arena__capture *capture = arena__by_tag[tag];
        if (!capture->counted || capture->thread == arena__self) continue;
        capture->counted = false;
        captures.open--;
    }
}

/* Once, before the first begin. */
void arena__captures_set_up(void) {
    captures.has_key = pthread_key_create(&captures.key, let_go) == 0;
    (void)pthread_atfork(NULL, NULL, forked);
}

static arena__thread *this_thread(void) {
    if (ARENA__LIKELY(arena__self != NULL)) return arena__self;
    arena__thread *thread = calloc(1, sizeof *thread);
    if (!thread) return NULL;
    thread->holders = 1;
    /* Without a key the record is lost with its thread, 16 bytes. */
    if (captures.has_key && pthread_setspecific(captures.key, thread) != 0) {
        free(thread);
        return NULL;
    }
    arena__self = thread;
    return thread;
}

static arena__capture *get_spare(void) {
    arena__capture *capture = captures.spare;
    if (capture) {
        captures.spare = capture->below;
        return capture;
    }
    if (captures.made + 1 >= sizeof arena__by_tag / sizeof *arena__by_tag) return NULL;
    capture = calloc(1, sizeof *capture);
    if (!capture) return NULL;
    capture->tag = (uint16_t)++captures.made;
    capture->runs = capture->low = ARENA__NONE;
    arena__by_tag[capture->tag] = capture;
    return capture;
}

void *arena__capture_begin(const void *tick) {
    if (ARENA__UNLIKELY(!arena__region.size) && !arena__heap_set_up()) {
        PyErr_SetString(PyExc_MemoryError,
                        "objects=True needs a range of addresses of its own, and the limit of this "
                        "process (ulimit -v) leaves too little for one");
        return NULL;
    }
    arena__thread *thread = this_thread();
    arena__capture *capture = thread ? get_spare() : NULL;
    if (!capture) {
        PyErr_SetString(PyExc_MemoryError,
                        "no memory for one more tick with objects=True; 65,534 can be open");
        return NULL;
    }
    arena__hooks_check();
    arena__numpy_begin();
    capture->tick = tick;
    capture->thread = thread;
    capture->state = PyThreadState_Get();
    atomic_fetch_add_explicit(&thread->holders, 1, memory_order_relaxed);
    capture->below = thread->current;
    thread->current = capture;
    captures.open++;
    capture->counted = true;
    return capture;
}

size_t arena__capture_end(void *data) {
    arena__capture *capture = data;
    arena__thread *thread = capture->thread;
    for (arena__capture **at = &thread->current; *at; at = &(*at)->below)
        if (*at == capture) {
            *at = capture->below;
            break;
        }
    bool asking = captures.asking;
    captures.asking = true; /* nor does the host's own memory go to a tick around this one */
    size_t escaped = arena__blocks_escape(capture);
    captures.asking = asking;
    let_go(thread);
    capture->below = captures.spare;
    captures.spare = capture;
    if (capture->counted) captures.open--;
    capture->counted = false;
    arena__retention_end(captures.open == 0);
    return escaped;
}

/* Makes the map of spans long enough for the word. */
bool arena__capture_widen(arena__capture *capture, uint32_t word) {
    uint32_t words = arena__region.committed / 64;
    if (words <= word) words = word + 1;
    uint64_t *seen = realloc(capture->seen, words * sizeof *seen);
    if (!seen) return false;
    memset(seen + capture->words, 0, (words - capture->words) * sizeof *seen);
    capture->seen = seen;
    capture->words = words;
    return true;
}

size_t arena__captures_open(void) {
    return captures.open;
}

arena__capture *arena__capturing(void) {
    arena__thread *thread = arena__self;
    if (ARENA__LIKELY(!thread)) return NULL;
    arena__capture *capture = thread->current;
    if (!capture || captures.asking) return NULL;
#if PY_VERSION_HEX >= 0x030d0000
    const PyThreadState *state = PyThreadState_GetUnchecked();
#else
    const PyThreadState *state = _PyThreadState_UncheckedGet();
#endif
    return state == capture->state ? capture : NULL;
}

uint32_t arena__site(const arena__capture *capture) {
    captures.asking = true;
    uint32_t site = arena__host.site(capture->tick);
    captures.asking = false;
    return site;
}
