/* watch.c: ticks that do more than most: with a limit, wiped, or with somebody who looks at what
 * escapes: sites are recorded, an audit keeps what ends, objects are captured.
 *
 * All of it is behind one flag of the tick and one global, so that a tick without it pays two tests.
 */
#include "py.h"

bool arena_py_objects; /* what a tick captures unless it says otherwise */
static const arena_link_objects *objects;

/* ---- What the objects module is lent ---------------------------------------------------------- */

/* `tick` is the core's record in its scope; each function is called with the GIL. */
static uint32_t site(const void *tick) {
    int depth = ((const arena_tick *)tick)->depth;
    return arena_py_site(depth ? depth : 1); /* a survivor without a line would help nobody */
}

static uint32_t escaped(const void *tick, uint32_t at, size_t size) {
    return arena__row_add(ARENA_ESCAPE_OBJECT, at, tick, size);
}

static const arena_link_host host = {
    ARENA_LINK_VERSION, site,
    escaped,            arena__row_sub,
    arena__row_resize,  arena__row_wants_example,
    arena__row_example,
};

PyObject *arena_py_host(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    return PyLong_FromVoidPtr((void *)(uintptr_t)&host);
}

PyObject *arena_py_connected(PyObject *unused, PyObject *address) {
    (void)unused;
    const arena_link_objects *lent = PyLong_AsVoidPtr(address);
    if (!lent && PyErr_Occurred()) return NULL;
    if (!lent || lent->version != ARENA_LINK_VERSION) {
        PyErr_SetString(PyExc_ImportError, "arena._objects is of another version than arena._native: "
                                           "build both again");
        return NULL;
    }
    objects = lent;
    Py_RETURN_NONE;
}

PyObject *arena_py_objects_always(PyObject *unused, PyObject *on) {
    (void)unused;
    if (!PyBool_Check(on)) {
        PyErr_Format(PyExc_TypeError, "_objects_always() takes True or False, not %R", on);
        return NULL;
    }
    if (on == Py_True && arena_py_want_objects() < 0) return NULL;
    arena_py_objects = on == Py_True;
    Py_RETURN_NONE;
}

bool arena_py_objects_connected(void) {
    return objects != NULL;
}

/* Loads the objects module when it is wanted first. */
int arena_py_want_objects(void) {
    if (objects) return 0;
    PyObject *done = PyObject_CallNoArgs(arena_py_lent.connect);
    Py_XDECREF(done);
    if (done && !objects)
        PyErr_SetString(PyExc_ImportError, "arena._objects did not connect");
    return objects ? 0 : -1;
}

/* ---- Ticks ------------------------------------------------------------------------------------ */

/* The name as C text, NULL when there is none; `plain` is what to let go of then. */
static const char *c_name(const Scope *scope, PyObject **plain) {
    Py_ssize_t size = 0;
    *plain = NULL;
    if (!scope->name) return NULL;
    const char *name = PyUnicode_AsUTF8AndSize(scope->name, &size);
    if (name && strlen(name) == (size_t)size) return name;
    PyErr_Clear(); /* a lone surrogate, or a NUL */
    *plain = PyUnicode_AsEncodedString(scope->name, "unicode_escape", NULL);
    name = *plain ? PyBytes_AsString(*plain) : NULL;
    if (!*plain) PyErr_Clear();
    return name;
}

/* Sites are recorded in this tick, `depth` frames of each. */
static int record_sites(Scope *scope, int depth, bool by_itself) {
    arena_tick *tick = &scope->tick;
    PyObject *plain;
    if (by_itself && arena__trace_hold() != ARENA_OK) {
        PyErr_NoMemory();
        return -1;
    }
    scope->holds_trace = by_itself;
    tick->named = arena__name_turn(c_name(scope, &plain));
    Py_XDECREF(plain);
    tick->begun = arena_py_site(depth);
    tick->over = 0;
    tick->depth = (uint8_t)depth;
    return 0;
}

/* Begins what the tick does more than others. -1 with an exception; then unwatch() undoes it. */
int arena_py_watch(Scope *scope, const Tick *face) {
    int depth = face->trace > arena_tracing() ? face->trace : arena_tracing();
    if (face->limit != ARENA__UNLIMITED) (void)arena__cap(&scope->tick, face->limit);
    if (face->wipe) scope->tick.wipe = true;
    if (ARENA__LOAD(arena__named_pools)) {
        PyObject *plain;
        scope->tick.pool = arena__pool_of(c_name(scope, &plain));
        Py_XDECREF(plain);
    }
    if (!depth && !face->objects) return 0;
    scope->watched = true;
    scope->holds_trace = false;
    scope->capture = NULL;
    scope->held = 0;
    if (record_sites(scope, depth ? depth : 1, !arena_tracing()) < 0) return -1;
    if (face->objects && !(scope->capture = objects->begin(&scope->tick))) return -1;
    return 0;
}

static void end_capture(Scope *scope) {
    void *capture = scope->capture;
    scope->capture = NULL;
    if (capture) (void)objects->end(capture);
}

/* Its cleanups have run. Returns how many chunks live views pin. */
size_t arena_py_end_watched(Scope *scope) {
    arena_tick *tick = &scope->tick;
    if (scope->watched) {
        end_capture(scope); /* first: what follows makes objects of its own */
        tick->over = arena_py_site(tick->depth);
    }
    bool keeps = arena_audit_now() && tick->chunks && !tick->wipe && !arena__tick_left_behind(tick);
    size_t pinned = keeps ? arena_py_keep(scope) : arena__tick_close(tick);
    if (scope->watched) {
        arena_py_entries_ended(scope);
        arena_py_unwatch(scope);
    }
    return pinned;
}

/* Nobody looks at it any more: it has ended, or nothing refers to it. */
void arena_py_unwatch(Scope *scope) {
    end_capture(scope);
    if (scope->holds_trace) arena__trace_drop();
    scope->holds_trace = false;
    scope->watched = false;
}
