/* py.h: what the files of csrc/python share. They are the only ones that know Python.h.
 *
 * Who owns whom: the user's code owns the Tick; the Tick owns its Scope; handles, inner scopes and
 * the context variable own the Scope too, but never the Tick. So a tick that its owner forgets is
 * collected, and its memory comes back, whatever still holds a handle; and no handle can be part
 * of a reference cycle, which is why handles need no place in the garbage collector.
 */
#ifndef ARENA_PY_H
#define ARENA_PY_H

#include <Python.h>

#include "../internal.h"
#include "../objects/link.h"
#include "register.h"

typedef struct Tick Tick;

/* One begun tick: the core's record and what the error messages need. */
typedef struct Scope {
    PyObject_HEAD
    arena_tick tick;
    struct Scope *parent; /* owned: what the context held at the begin, of whichever thread */
    struct Scope *around; /* owned: the tick whose limits hold for this one, or NULL */
    Tick *face;           /* borrowed: NULL once the user's object is gone */
    PyObject *label;      /* owned: exactly str, of requests only: see requests.c */
    PyObject *name;       /* owned: exactly str, or NULL: freeing it runs no Python code */
    unsigned long thread; /* ident of the owner, for messages */
    bool watched;         /* its end is more than giving memory back: see watch.c */
    bool holds_trace;     /* it records sites by itself */
    bool waits;           /* it has ended with live handles: see sites.c */
    uint32_t held;        /* those that are in no row of the map yet */
    uint64_t since;
    struct Scope *prev_waiting, *next_waiting;
    void *capture;        /* of Python objects, or NULL */
    struct Scope *kept_prev, *kept_next; /* among those that an audit keeps, by age */
} Scope;

struct Tick {
    PyObject_HEAD
    Scope *scope;       /* owned: NULL before the begin */
    PyObject *name;     /* owned: str, or NULL */
    PyObject *cleanups; /* owned: list of (fn, args, kwargs), or NULL */
    size_t limit;
    bool raise_escapes;
    bool wipe;
    bool objects;
    bool special; /* it has a limit, wipe, trace or objects */
    bool swept; /* a request that nobody delivered */
    uint8_t trace;
    bool seen_by_gc; /* the collector has marked it as finalized: its memory is not reused */
};

/* What every handle starts with. scope == NULL: persisted memory. */
#define HANDLE_HEAD                                                                               \
    PyObject_HEAD                                                                                 \
    Scope *scope;                                                                                 \
    Py_ssize_t exports; /* live buffer exports */                                                 \
    bool freed;         /* persisted memory that was freed */                                     \
    uint32_t entry;     /* while sites are recorded: see sites.c */

typedef struct Handle {
    HANDLE_HEAD
} Handle;

typedef struct Piece { /* Block and Str */
    HANDLE_HEAD
    char *data;
    size_t size;
    arena__chunk *chunk;
} Piece;

typedef struct StrBuf {
    HANDLE_HEAD
    arena_strbuf buf;
} StrBuf;

/* What Requests has in C. Its requests own it, and so do their handles. */
typedef struct Registry {
    PyObject_HEAD
    arena__group group;
    PyObject *name; /* owned: exactly str */
    unsigned long long opened, discarded, swept;
    bool closed;
} Registry;

extern PyTypeObject *arena_py_Scope, *arena_py_Tick, *arena_py_Block, *arena_py_Str,
    *arena_py_StrBuf, *arena_py_Registry, *arena_py_Ending;
extern PyType_Spec arena_py_scope_spec, arena_py_tick_spec, arena_py_block_spec, arena_py_str_spec,
    arena_py_strbuf_spec, arena_py_registry_spec, arena_py_ending_spec;

/* module.c: the classes of arena.errors and the functions that the capabilities lend us. */
extern struct arena_py_lent {
    PyObject *ArenaError, *StaleError, *ClosedError, *TickError, *WrongThreadError, *LimitError, *EscapeError;
    PyObject *thread_label; /* (ident) -> str */
    PyObject *settle;       /* (tick, failures, escape, body) -> exception or None */
    PyObject *decorate;     /* (fn, name, options) -> fn */
    PyObject *connect;      /* () -> None: loads the objects module, for its hooks */
    PyObject *prepare;      /* () -> None: makes ready for the recording of sites */
    PyObject *trim;         /* trim(), but for the case that there is nothing to do */
    PyObject *is_finalizing;
} arena_py_lent;

/* scope.c */
int arena_py_scope_setup(void);
Scope *arena_py_scope_begin(Tick *face, PyObject *name);
Scope *arena_py_scope_apart(Tick *face, Registry *registry, PyObject *label);
Scope *arena_py_scope_current(void);
Scope *arena_py_scope_needed(void);
/* A request is everybody's. */
static inline bool arena_py_scope_mine(const Scope *scope) {
    uint64_t owner = ARENA__LOAD(scope->tick.owner);
    return ARENA__LIKELY(owner == arena__tid()) || owner == ARENA__ANYONE;
}

/* errors.c: the one place that turns a code into an exception. */
void arena_py_raise(int code, Scope *scope, size_t requested);
void arena_py_raise_state(Scope *scope);
void arena_py_raise_thread(Scope *scope, const char *what);
void arena_py_raise_unusable(Handle *handle);
void arena_py_raise_unusable_as(Handle *handle, PyObject *stale);
PyObject *arena_py_describe(Scope *scope);

/* tick.c */
PyObject *arena_py_tick_new(PyObject *const *args, Py_ssize_t count, PyObject *names);
Tick *arena_py_tick_apart(Registry *registry, PyObject *label, size_t limit);
int arena_py_tick_end(Tick *tick, PyObject *body);
bool arena_py_tick_is_open(const Tick *tick);
PyObject *arena_py_take_exception(void);
int arena_py_tick_begin(Tick *tick);
PyObject *arena_py_cleanup_in(Scope *scope, PyObject *const *args, Py_ssize_t count,
                              PyObject *names);

/* requests.c */
static inline Registry *arena_py_registry_of(const arena__group *group) {
    return (Registry *)((uintptr_t)group - offsetof(Registry, group));
}
PyObject *arena_py_registry_new(PyObject *unused, PyObject *args);

/* watch.c: ticks that do more than most. */
int arena_py_watch(Scope *scope, const Tick *face);
size_t arena_py_end_watched(Scope *scope);
void arena_py_unwatch(Scope *scope);
PyObject *arena_py_host(PyObject *unused, PyObject *unused2);
PyObject *arena_py_connected(PyObject *unused, PyObject *address);
bool arena_py_objects_connected(void);
PyObject *arena_py_objects_always(PyObject *unused, PyObject *on);
extern bool arena_py_objects;
int arena_py_want_objects(void);

/* sites.c */
uint32_t arena_py_site(int depth);
int arena_py_depth(PyObject *object, int *depth);
ARENA__NOINLINE void arena_py_entry_new(Handle *handle);
ARENA__NOINLINE void arena_py_entry_gone(Handle *handle);
ARENA__NOINLINE void arena_py_entry_unpinned(Handle *handle);
void arena_py_entries_ended(Scope *scope);
void arena_py_wait(Scope *scope);
void arena_py_wait_over(Scope *scope);
void arena_py_note_use(Handle *handle);
void arena_py_show(Handle *handle, uint32_t row);
ARENA__NOINLINE void arena_py_show_persisted(PyObject *piece);
PyObject *arena_py_sites_of(Handle *handle);
PyObject *arena_py_rows(PyObject *unused, PyObject *unused2);
PyObject *arena_py_sites_setup(PyObject *unused, PyObject *args);
PyObject *arena_py_sites_ready(PyObject *unused, PyObject *unused2);
PyObject *arena_py_walker(PyObject *unused, PyObject *address);

/* audit.c */
size_t arena_py_keep(Scope *scope);
void arena_py_kept_gone(Scope *scope);
ARENA__NOINLINE bool arena_py_use_kept(Handle *handle);
PyObject *arena_py_audit(PyObject *unused, PyObject *budget);

/* handle.c: what Block, Str and StrBuf do alike. */
typedef struct Span {
    const char *data;
    size_t size;
} Span;
static inline bool arena_py_usable(const Handle *handle) {
    const Scope *scope = handle->scope;
    if (ARENA__LIKELY(scope != NULL))
        return ARENA__LIKELY(!arena__is_over(&scope->tick))
                   ? ARENA__LIKELY(arena_py_scope_mine(scope))
                   : arena__state(&scope->tick) == ARENA__KEPT && arena_py_use_kept((Handle *)(uintptr_t)handle);
    return !handle->freed;
}
/* 0, or -1 with an exception. */
static inline int arena_py_check(Handle *handle) {
    if (ARENA__LIKELY(arena_py_usable(handle))) return 0;
    arena_py_raise_unusable(handle);
    return -1;
}
bool arena_py_is_handle(PyObject *object);
Span arena_py_span(Handle *handle);
void arena_py_handle_dealloc(PyObject *self);
void arena_py_handle_free_data(Handle *handle);
PyObject *arena_py_handle_repr(PyObject *self);
PyObject *arena_py_handle_str(PyObject *self);
PyObject *arena_py_handle_compare(PyObject *self, PyObject *other, int op);
Py_ssize_t arena_py_handle_len(PyObject *self);
int arena_py_handle_contains(PyObject *self, PyObject *what);
PyObject *arena_py_handle_byte(PyObject *self, Py_ssize_t index);
PyObject *arena_py_handle_iter(PyObject *self);
PyObject *arena_py_handle_item(PyObject *self, PyObject *key);
int arena_py_handle_set_item(PyObject *self, PyObject *key, PyObject *value);
int arena_py_handle_get_buffer(PyObject *self, Py_buffer *view, int flags);
void arena_py_handle_release_buffer(PyObject *self, Py_buffer *view);
PyObject *arena_py_handle_bytes(PyObject *self, PyObject *unused);
PyObject *arena_py_handle_free(PyObject *self, PyObject *unused);
PyObject *arena_py_handle_discard(PyObject *self, PyObject *unused);
PyObject *arena_py_handle_persist(PyObject *self, PyObject *unused);
PyObject *arena_py_handle_reduce(PyObject *self, PyObject *unused);
PyObject *arena_py_persist(PyObject *unused, PyObject *what);
PyObject *arena_py_handle_stale(PyObject *self, void *unused);
PyObject *arena_py_handle_persisted(PyObject *self, void *unused);
PyObject *arena_py_handle_nbytes(PyObject *self, void *unused);

#define HANDLE_GETSET                                                                             \
    {"stale", arena_py_handle_stale, NULL, "True once the memory is gone: tick ended, or freed.", \
     NULL},                                                                                       \
        {"persisted", arena_py_handle_persisted, NULL,                                            \
         "True when the memory belongs to no tick.", NULL},                                       \
        {"nbytes", arena_py_handle_nbytes, NULL, "The size in bytes; also of a stale handle.",    \
         NULL}

#define HANDLE_METHODS                                                                            \
    {"__bytes__", arena_py_handle_bytes, METH_NOARGS, "A copy of the content as bytes."},         \
        {"__reduce_ex__", arena_py_handle_reduce, METH_O, NULL},                                  \
        {"persist", arena_py_handle_persist, METH_NOARGS, PERSIST_DOC},                           \
        {"free", arena_py_handle_free, METH_NOARGS, FREE_DOC},                                    \
        {"_discard", arena_py_handle_discard, METH_NOARGS, DISCARD_DOC}

#define PERSIST_DOC                                                                               \
    "persist($self, /)\n--\n\n"                                                                   \
    "Copy the content out of its tick: a handle of the same type whose memory lives until\n"      \
    "free() or until the handle is collected. It may cross threads. Raises StaleError,\n"         \
    "WrongThreadError, MemoryError. C: arena_memdup_persist."
#define FREE_DOC                                                                                  \
    "free($self, /)\n--\n\n"                                                                      \
    "Free persisted memory now. Raises BufferError while a view lives, StaleError when it was\n"  \
    "freed before, TickError for scratch, which goes with its tick. C: arena_free_persist."
#define DISCARD_DOC                                                                               \
    "_discard($self, /)\n--\n\n"                                                                  \
    "Free persisted memory now, or when its last view dies. For containers that own it."

/* piece.c, strbuf.c */
PyObject *arena_py_block_new(Scope *scope, PyObject *size);
PyObject *arena_py_str_new(Scope *scope, PyObject *text, const char *what);
PyObject *arena_py_str_from(Scope *scope, const char *data, size_t size);
PyObject *arena_py_block_from(Scope *scope, const char *data, size_t size);
PyObject *arena_py_strbuf_new(Scope *scope, PyObject *initial);

/* heap.c */
PyObject *arena_py_trim(PyObject *unused, PyObject *args, PyObject *kwargs);
PyObject *arena_py_trim_run(PyObject *unused, PyObject *args);
PyObject *arena_py_trim_nothing(PyObject *unused, PyObject *result);
PyObject *arena_py_trim_is_idle(PyObject *unused, PyObject *unused2);

/* figures.c */
PyObject *arena_py_heap_figures(PyObject *unused, PyObject *unused2);
PyObject *arena_py_heap_count(PyObject *unused, PyObject *unused2);
PyObject *arena_py_heap_set(PyObject *unused, PyObject *args);
PyObject *arena_py_small_objects(PyObject *unused, PyObject *unused2);

/* convert.c: what a Python object has to offer as bytes. */
#define ARENA_PY_SHORT_TEXT 2048 /* below it, the UTF-8 that CPython caches in a str is fine */
typedef struct Source {
    const char *data;
    size_t size;
    PyObject *keep;
    Py_buffer view;
    bool has_view;
} Source;
int arena_py_source(Source *source, PyObject *object, const char *what);
void arena_py_source_done(Source *source);
int arena_py_size(PyObject *object, const char *what, size_t *size);
int arena_py_limit(PyObject *object, size_t *limit);
PyObject *arena_py_size_of(PyObject *unused, PyObject *const *args, Py_ssize_t count);
int arena_py_one_optional(const char *fn, const char *name, PyObject *const *args,
                          Py_ssize_t count, PyObject *names, PyObject **value);

#endif
