/* tick.c: the Tick type, the context manager around one turn of a loop. */
#include "py.h"

PyTypeObject *arena_py_Tick;

/* Ticks kept for the next ones, as for scopes. */
#define SPARES 16
static Tick *spares[SPARES];
static int spare_count;

static Tick *tick_alloc(void) {
    Tick *tick;
    if (spare_count)
        tick = (Tick *)PyObject_Init((PyObject *)spares[--spare_count], arena_py_Tick);
    else if (!(tick = PyObject_GC_New(Tick, arena_py_Tick)))
        return NULL;
    tick->scope = NULL;
    tick->name = NULL;
    tick->cleanups = NULL;
    tick->limit = ARENA__UNLIMITED;
    tick->raise_escapes = tick->wipe = tick->swept = false;
    tick->objects = tick->special = arena_py_objects;
    tick->trace = 0;
    tick->seen_by_gc = false;
    PyObject_GC_Track(tick);
    return tick;
}

static int set_escapes(Tick *tick, PyObject *value) {
    if (PyUnicode_Check(value)) {
        if (PyUnicode_CompareWithASCIIString(value, "allow") == 0) return 0;
        if (PyUnicode_CompareWithASCIIString(value, "raise") == 0) {
            tick->raise_escapes = true;
            return 0;
        }
    }
    PyErr_Format(PyUnicode_Check(value) ? PyExc_ValueError : PyExc_TypeError,
                 "escapes is \"allow\" or \"raise\", not %R", value);
    return -1;
}

static int set_wipe(Tick *tick, PyObject *value) {
    if (!PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "wipe is True or False, not %R", value);
        return -1;
    }
    tick->wipe = value == Py_True;
    return 0;
}

static int set_objects(Tick *tick, PyObject *value) {
    if (!PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "objects is True or False, not %R", value);
        return -1;
    }
    tick->objects = value == Py_True;
    return tick->objects ? arena_py_want_objects() : 0;
}

static int set_trace(Tick *tick, PyObject *value) {
    int depth;
    if (arena_py_depth(value, &depth) < 0) return -1;
    tick->trace = (uint8_t)depth;
    if (!depth) return 0;
    PyObject *found = PyObject_CallNoArgs(arena_py_lent.prepare);
    Py_XDECREF(found);
    return found ? 0 : -1;
}

static int set_name(Tick *tick, PyObject *value) {
    if (value == Py_None) return 0;
    if (!PyUnicode_Check(value)) {
        PyObject *type = PyType_GetName(Py_TYPE(value));
        if (!type) return -1;
        PyErr_Format(PyExc_TypeError, "the name of a tick is a str or None, not %U", type);
        Py_DECREF(type);
        return -1;
    }
    tick->name = PyUnicode_FromObject(value); /* exactly a str: a subclass could run code */
    return tick->name ? 0 : -1;
}

static int set_options(Tick *tick, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    if (count > 1) {
        PyErr_Format(PyExc_TypeError,
                     "a tick takes 1 positional argument, its name (%zd given): limit=, escapes=, "
                     "wipe=, trace= and objects= go by name",
                     count);
        return -1;
    }
    if (count && set_name(tick, args[0]) < 0) return -1;
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *key = PyTuple_GetItem(names, i), *value = args[count + i];
        int failed;
        if (PyUnicode_CompareWithASCIIString(key, "limit") == 0) {
            failed = arena_py_limit(value, &tick->limit);
        } else if (PyUnicode_CompareWithASCIIString(key, "escapes") == 0) {
            failed = set_escapes(tick, value);
        } else if (PyUnicode_CompareWithASCIIString(key, "wipe") == 0) {
            failed = set_wipe(tick, value);
        } else if (PyUnicode_CompareWithASCIIString(key, "trace") == 0) {
            failed = set_trace(tick, value);
        } else if (PyUnicode_CompareWithASCIIString(key, "objects") == 0) {
            failed = set_objects(tick, value);
        } else if (PyUnicode_CompareWithASCIIString(key, "name") == 0 && !count) {
            failed = set_name(tick, value);
        } else {
            PyErr_Format(PyExc_TypeError, "a tick got an unexpected keyword argument %R", key);
            failed = -1;
        }
        if (failed) return -1;
    }
    tick->special = tick->limit != ARENA__UNLIMITED || tick->wipe || tick->trace || tick->objects;
    return 0;
}

/* A function that opens a tick like this one around each call. */
static PyObject *decorate(Tick *tick, PyObject *fn) {
    PyObject *limit = tick->limit == ARENA__UNLIMITED ? Py_NewRef(Py_None)
                                                      : PyLong_FromSize_t(tick->limit);
    if (!limit) return NULL;
    PyObject *decorated = PyObject_CallFunction(
        arena_py_lent.decorate, "OO{sOsssOsisO}", fn, tick->name ? tick->name : Py_None, "limit", limit,
        "escapes", tick->raise_escapes ? "raise" : "allow", "wipe", tick->wipe ? Py_True : Py_False,
        "trace", (int)tick->trace, "objects", tick->objects ? Py_True : Py_False);
    Py_DECREF(limit);
    return decorated;
}

PyObject *arena_py_tick_new(PyObject *const *args, Py_ssize_t count, PyObject *names) {
    Tick *tick = tick_alloc();
    if (!tick) return NULL;
    if (ARENA__LIKELY(!count && !names)) return (PyObject *)tick;
    /* @arena.tick with no parentheses. A classmethod is no callable, and deserves its message. */
    if (count == 1 && !names && !PyUnicode_Check(args[0]) &&
        (PyCallable_Check(args[0]) || PyObject_HasAttrString(args[0], "__func__"))) {
        PyObject *fn = decorate(tick, args[0]);
        Py_DECREF(tick);
        return fn;
    }
    if (set_options(tick, args, count, names) < 0) {
        Py_DECREF(tick);
        return NULL;
    }
    return (PyObject *)tick;
}

/* A request, open. */
Tick *arena_py_tick_apart(Registry *registry, PyObject *label, size_t limit) {
    Tick *tick = tick_alloc();
    if (!tick) return NULL;
    tick->name = Py_NewRef(registry->name);
    tick->limit = limit;
    tick->special = limit != ARENA__UNLIMITED;
    tick->objects = false; /* captured by thread and by current tick: a request is neither's */
    if ((tick->scope = arena_py_scope_apart(tick, registry, label))) return tick;
    Py_DECREF((PyObject *)tick);
    return NULL;
}

int arena_py_tick_begin(Tick *tick) {
    if (ARENA__UNLIKELY(tick->scope != NULL)) {
        PyObject *which = arena_py_describe(tick->scope);
        if (which)
            PyErr_Format(arena_py_lent.TickError,
                         "%U has begun before: each `with` needs an arena.tick() of its own", which);
        Py_XDECREF(which);
        return -1;
    }
    Scope *scope = arena_py_scope_begin(tick, tick->name);
    if (!scope) return -1;
    tick->scope = scope;
    return 0;
}

/* The exception that is set, taken: normalized, with its traceback. */
PyObject *arena_py_take_exception(void) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value && traceback) (void)PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* Runs the cleanups, last in first out, each taken off the list before it is called. Returns a list
 * of what they raised, or NULL. */
static PyObject *run_cleanups(Tick *tick) {
    PyObject *list = tick->cleanups, *failures = NULL;
    tick->cleanups = NULL;
    for (Py_ssize_t left = PyList_Size(list); left > 0; left--) {
        PyObject *item = Py_XNewRef(PyList_GetItem(list, left - 1));
        PyObject *result = NULL, *fn, *args, *kwargs;
        /* Replaced and not cut off: a list that shrinks may ask for memory. */
        if (item && PyList_SetItem(list, left - 1, Py_NewRef(Py_None)) == 0 &&
            PyArg_ParseTuple(item, "OOO", &fn, &args, &kwargs))
            result = PyObject_Call(fn, args, kwargs);
        Py_XDECREF(item);
        if (result) {
            Py_DECREF(result);
            continue;
        }
        /* CPython 3.11 loses an exception when it has no memory for its traceback. */
        if (!PyErr_Occurred()) (void)PyErr_NoMemory();
        PyObject *error = arena_py_take_exception();
        if (!failures) failures = PyList_New(0);
        if (!failures || !error || PyList_Append(failures, error) < 0) {
            /* No memory to keep it: told, not lost. */
            if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
            PyErr_WriteUnraisable((PyObject *)tick);
        }
        Py_XDECREF(error);
    }
    Py_DECREF(list);
    return failures;
}

/* Cleanups, then the memory. Returns how many chunks views have pinned. */
static size_t finish(Tick *tick, PyObject **failures) {
    arena_tick *core = &tick->scope->tick;
    *failures = NULL;
    if (ARENA__UNLIKELY(tick->cleanups != NULL)) {
        if (arena__state(core) == ARENA__OPEN) arena__tick_ending(core);
        *failures = run_cleanups(tick);
    }
    if (arena__is_over(core)) return 0;
    if (ARENA__UNLIKELY(tick->scope->watched || ARENA__LOAD(arena__budget)))
        return arena_py_end_watched(tick->scope);
    return arena__tick_close(core);
}

/* What went wrong at an end, beside the body's own exception (or NULL). */
static ARENA__NOINLINE int settle(Tick *tick, PyObject *failures, size_t pinned, PyObject *body) {
    PyObject *which = arena_py_describe(tick->scope), *escape = NULL, *error = NULL;
    if (which && pinned && tick->raise_escapes) {
        PyObject *text = PyUnicode_FromFormat(
            "%U ended while views into it were alive: they pin %zu chunk(s); release() them or "
            "copy with bytes() before the end",
            which, pinned);
        if (text) escape = PyObject_CallFunctionObjArgs(arena_py_lent.EscapeError, text, NULL);
        Py_XDECREF(text);
    }
    PyObject *none = failures ? NULL : PyList_New(0);
    if (which && (failures || none) && !PyErr_Occurred())
        error = PyObject_CallFunctionObjArgs(arena_py_lent.settle, which, failures ? failures : none,
                                             escape ? escape : Py_None, body ? body : Py_None, NULL);
    if (error && error != Py_None) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(none);
    Py_XDECREF(escape);
    Py_XDECREF(which);
    Py_XDECREF(failures);
    return PyErr_Occurred() ? -1 : 0;
}

static inline __attribute__((always_inline)) bool is_open_here(const Tick *tick) {
    const Scope *scope = tick->scope;
    return ARENA__LIKELY(scope && arena__state(&scope->tick) == ARENA__OPEN && arena_py_scope_mine(scope));
}

static void raise_not_open(Tick *tick) {
    if (tick->scope)
        arena_py_raise_state(tick->scope);
    else
        PyErr_SetString(arena_py_lent.TickError,
                        "the tick has not begun: use it in a `with`, or arena.begin()");
}

static int end(Tick *tick, PyObject *body) {
    if (!is_open_here(tick)) {
        raise_not_open(tick);
        return -1;
    }
    PyObject *failures;
    size_t pinned = finish(tick, &failures);
    if (ARENA__LIKELY(!failures && !(pinned && tick->raise_escapes))) return 0;
    return settle(tick, failures, pinned, body);
}

static PyObject *tick_end(PyObject *self, PyObject *unused) {
    (void)unused;
    if (end((Tick *)self, NULL) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *tick_enter(PyObject *self, PyObject *unused) {
    (void)unused;
    if (arena_py_tick_begin((Tick *)self) < 0) return NULL;
    Py_INCREF(self);
    return self;
}

bool arena_py_tick_is_open(const Tick *tick) {
    return is_open_here(tick);
}

/* Ends the tick on its way out of a body. 0, or -1 with an exception: never beside the body's own. */
int arena_py_tick_end(Tick *tick, PyObject *body) {
    if (ARENA__LIKELY(end(tick, body) == 0)) return 0;
    if (!body) return -1;
    /* The body's exception is on its way: what went wrong here is told in a note of it. */
    PyObject *error = arena_py_take_exception();
    PyObject *note = error ? PyUnicode_FromFormat("at the end of the tick: %S", error) : NULL;
    PyObject *done = note ? PyObject_CallMethod(body, "add_note", "O", note) : NULL;
    Py_XDECREF(error);
    Py_XDECREF(note);
    Py_XDECREF(done);
    if (!done) PyErr_WriteUnraisable((PyObject *)tick); /* a body's exception that takes no notes */
    return 0;
}

static PyObject *tick_exit(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "__exit__() takes 3 arguments (%zd given)", count);
        return NULL;
    }
    if (arena_py_tick_end((Tick *)self, args[1] == Py_None ? NULL : args[1]) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *tick_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    Tick *tick = (Tick *)self;
    if (PyTuple_Size(args) != 1 || (kwargs && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError,
                        "calling a tick decorates a function: @arena.tick(\"name\")");
        return NULL;
    }
    return decorate(tick, PyTuple_GetItem(args, 0));
}

static PyObject *tick_alloc_block(PyObject *self, PyObject *size) {
    if (!is_open_here((Tick *)self)) {
        raise_not_open((Tick *)self);
        return NULL;
    }
    return arena_py_block_new(((Tick *)self)->scope, size);
}

static PyObject *tick_strdup(PyObject *self, PyObject *text) {
    if (!is_open_here((Tick *)self)) {
        raise_not_open((Tick *)self);
        return NULL;
    }
    return arena_py_str_new(((Tick *)self)->scope, text, "strdup()");
}

static PyObject *tick_strbuf(PyObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *names) {
    PyObject *initial;
    if (arena_py_one_optional("strbuf", "initial", args, count, names, &initial) < 0) return NULL;
    if (!is_open_here((Tick *)self)) {
        raise_not_open((Tick *)self);
        return NULL;
    }
    return arena_py_strbuf_new(((Tick *)self)->scope, initial);
}

PyObject *arena_py_cleanup_in(Scope *scope, PyObject *const *args, Py_ssize_t count,
                              PyObject *names) {
    if (count < 1 || !PyCallable_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "cleanup(fn, *args, **kwargs) takes a callable first");
        return NULL;
    }
    Tick *tick = (Tick *)Py_NewRef((PyObject *)scope->face);
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *item = NULL, *rest = PyTuple_New(count - 1), *kwargs = PyDict_New(), *done = NULL;
    PyObject *list = PyList_New(0);
    if (!rest || !kwargs || !list) goto out;
    for (Py_ssize_t i = 1; i < count; i++)
        if (PyTuple_SetItem(rest, i - 1, Py_NewRef(args[i])) < 0) goto out;
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(kwargs, PyTuple_GetItem(names, i), args[count + i]) < 0) goto out;
    if (!(item = PyTuple_Pack(3, args[0], rest, kwargs))) goto out;
    /* Making these may have run code that ended the tick. From here on nothing does. */
    if (!is_open_here(tick)) {
        raise_not_open(tick);
        goto out;
    }
    if (!tick->cleanups) tick->cleanups = Py_NewRef(list);
    if (PyList_Append(tick->cleanups, item) == 0) done = Py_NewRef(Py_None);
out:
    Py_XDECREF(list);
    Py_XDECREF(item);
    Py_XDECREF(rest);
    Py_XDECREF(kwargs);
    Py_DECREF(tick);
    return done;
}

static PyObject *tick_cleanup(PyObject *self, PyObject *const *args, Py_ssize_t count,
                              PyObject *names) {
    if (!is_open_here((Tick *)self)) {
        raise_not_open((Tick *)self);
        return NULL;
    }
    return arena_py_cleanup_in(((Tick *)self)->scope, args, count, names);
}

static PyObject *get_name(PyObject *self, void *unused) {
    (void)unused;
    PyObject *name = ((Tick *)self)->name;
    return Py_NewRef(name ? name : Py_None);
}

static PyObject *get_number(PyObject *self, void *unused) {
    (void)unused;
    Scope *scope = ((Tick *)self)->scope;
    return PyLong_FromUnsignedLongLong(scope ? scope->tick.number : 0);
}

static PyObject *get_open(PyObject *self, void *unused) {
    (void)unused;
    Scope *scope = ((Tick *)self)->scope;
    return PyBool_FromLong(scope && arena__state(&scope->tick) == ARENA__OPEN);
}

static PyObject *get_used(PyObject *self, void *unused) {
    (void)unused;
    Scope *scope = ((Tick *)self)->scope;
    return PyLong_FromSize_t(scope ? arena__used(&scope->tick) : 0);
}

static PyObject *get_limit(PyObject *self, void *unused) {
    (void)unused;
    size_t limit = ((Tick *)self)->limit;
    if (limit == ARENA__UNLIMITED) Py_RETURN_NONE;
    return PyLong_FromSize_t(limit);
}

static PyObject *get_wipe(PyObject *self, void *unused) {
    (void)unused;
    const Tick *tick = (Tick *)self;
    return PyBool_FromLong(tick->scope ? tick->scope->tick.wipe : tick->wipe);
}

static PyObject *get_trace(PyObject *self, void *unused) {
    (void)unused;
    const Tick *tick = (Tick *)self;
    return PyLong_FromLong(tick->scope ? tick->scope->tick.depth : tick->trace);
}

static PyObject *get_objects(PyObject *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(((Tick *)self)->objects);
}

static PyObject *tick_repr(PyObject *self) {
    Tick *tick = (Tick *)self;
    if (!tick->scope)
        return tick->name ? PyUnicode_FromFormat("<arena.Tick %R, not begun>", tick->name)
                          : PyUnicode_FromString("<arena.Tick, not begun>");
    PyObject *which = arena_py_describe(tick->scope), *text = NULL;
    if (!which) return NULL;
    if (arena__is_over(&tick->scope->tick))
        text = PyUnicode_FromFormat("<arena.Tick: %U, ended>", which);
    else
        text = PyUnicode_FromFormat("<arena.Tick: %U, %s, %zu bytes used>", which,
                                    arena__state(&tick->scope->tick) == ARENA__OPEN ? "open" : "ending",
                                    arena__used(&tick->scope->tick));
    Py_DECREF(which);
    return text;
}

static int tick_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Tick *)self)->cleanups);
    return 0;
}

static int tick_clear(PyObject *self) {
    Py_CLEAR(((Tick *)self)->cleanups);
    return 0;
}

/* A tick that nobody can end any more: its cleanups run, its memory comes back, and a
 * ResourceWarning says so. At the exit of the interpreter it is quiet, and the cleanups are left
 * out: what they would call is half torn down. */
static void end_forgotten(Tick *tick) {
    PyObject *type, *value, *traceback, *failures = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *exiting = PyObject_CallNoArgs(arena_py_lent.is_finalizing);
    if (!exiting) PyErr_Clear();
    /* So too in the child of a fork, for a tick of a thread that is not there: its cleanups would
     * undo what the parent still needs. */
    bool quiet = !exiting || exiting == Py_True || arena__tick_left_behind(&tick->scope->tick);
    Py_XDECREF(exiting);
    if (quiet) Py_CLEAR(tick->cleanups);
    (void)finish(tick, &failures);
    if (failures && settle(tick, failures, 0, NULL) < 0) PyErr_WriteUnraisable((PyObject *)tick);
    PyObject *which = quiet ? NULL : arena_py_describe(tick->scope);
    if (which)
        (void)PyErr_ResourceWarning(NULL, 1,
                                    "%U was never ended: it was collected, and its memory is back; %s",
                                    which,
                                    tick->scope->tick.group
                                        ? "keep its registry, and discard it or close that"
                                        : "keep what begin() returns and call its end()");
    if (PyErr_Occurred()) PyErr_WriteUnraisable((PyObject *)tick);
    Py_XDECREF(which);
    PyErr_Restore(type, value, traceback);
}

/* Open, or with its memory swept away when its thread ended: the cleanups are still to be run. */
static bool is_forgotten(const Tick *tick) {
    if (!tick->scope) return false;
    uint8_t state = arena__state(&tick->scope->tick);
    return state == ARENA__OPEN || (state <= ARENA__KEPT && tick->cleanups != NULL);
}

/* Called by the collector only: a tick in a reference cycle with its own cleanups. */
static void tick_finalize(PyObject *self) {
    Tick *tick = (Tick *)self;
    tick->seen_by_gc = true;
    if (is_forgotten(tick)) end_forgotten(tick);
}

static void tick_dealloc(PyObject *self) {
    Tick *tick = (Tick *)self;
    if (ARENA__UNLIKELY(is_forgotten(tick))) {
        /* Cleanups and warning filters are Python code, which may take references. */
        Py_SET_REFCNT(self, 1);
        end_forgotten(tick);
        if (Py_REFCNT(self) > 1) {
            Py_DECREF(self);
            return;
        }
        Py_SET_REFCNT(self, 0);
    }
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    PyObject *name = tick->name, *cleanups = tick->cleanups;
    Scope *scope = tick->scope;
    if (scope) scope->face = NULL;
    if (spare_count < SPARES && !tick->seen_by_gc)
        spares[spare_count++] = tick;
    else
        PyObject_GC_Del(tick);
    Py_DECREF(type);
    Py_XDECREF((PyObject *)scope);
    Py_XDECREF(name);
    Py_XDECREF(cleanups);
}

static PyObject *tick_reduce(PyObject *self, PyObject *protocol) {
    (void)self, (void)protocol;
    PyErr_SetString(PyExc_TypeError, "a Tick cannot be pickled or copied: it is open in one thread");
    return NULL;
}

static PyMethodDef tick_methods[] = {
    {"__reduce_ex__", tick_reduce, METH_O, NULL},
    {"__enter__", tick_enter, METH_NOARGS, "Begin the tick and make it current."},
    {"__exit__", (PyCFunction)(void (*)(void))tick_exit, METH_FASTCALL,
     "End the tick. An exception of the body always wins; what its cleanups raise is added as\n"
     "notes."},
    {"end", tick_end, METH_NOARGS,
     "end($self, /)\n--\n\n"
     "End the tick: run its cleanups, last in first out, then give its memory back. Handles of it\n"
     "are stale from here on; memory that a live view shows stays until the view dies. Takes a time\n"
     "that depends on the chunks, not on the number of allocations in them. Raises TickError when it is not open,\n"
     "WrongThreadError, EscapeError, and an ExceptionGroup of what the cleanups raised.\n"
     "C: arena_end."},
    {"alloc", tick_alloc_block, METH_O,
     "alloc($self, size, /)\n--\n\n"
     "A Block of `size` zeroed, writable bytes. Raises TickError, WrongThreadError, LimitError,\n"
     "MemoryError, TypeError, ValueError. C: arena_zalloc."},
    {"strdup", tick_strdup, METH_O,
     "strdup($self, text, /)\n--\n\n"
     "A Str: an immutable copy of a str (as UTF-8), a bytes-like object or a handle. Raises as\n"
     "alloc, and UnicodeEncodeError for a lone surrogate. C: arena_memdup."},
    {"strbuf", (PyCFunction)(void (*)(void))tick_strbuf, METH_FASTCALL | METH_KEYWORDS,
     "strbuf($self, initial=None)\n--\n\n"
     "A StrBuf: a growing string that grows in this tick, whichever is current. It starts with a\n"
     "copy of `initial`. Raises as strdup. C: arena_strbuf_new."},
    {"cleanup", (PyCFunction)(void (*)(void))tick_cleanup, METH_FASTCALL | METH_KEYWORDS,
     "cleanup($self, fn, /, *args, **kwargs)\n--\n\n"
     "Call fn(*args, **kwargs) when the tick ends. Cleanups run last in first out, each once, all\n"
     "of them even when some fail; they may read the tick's memory but not allocate in it. Raises\n"
     "TickError, WrongThreadError, TypeError. C: arena_cleanup."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tick_getset[] = {
    {"name", get_name, NULL, "The name given at the begin, or None.", NULL},
    {"number", get_number, NULL,
     "1, 2, 3, ... in the order of begins in the process; 0 before the begin. C: arena_number.",
     NULL},
    {"open", get_open, NULL, "True from the begin until the end starts.", NULL},
    {"used", get_used, NULL,
     "Bytes asked for now; a StrBuf counts by its length. Any thread may read it. C: arena_used.",
     NULL},
    {"limit", get_limit, NULL,
     "The most bytes that it and the ticks inside of it may hold, or None. C: arena_limit.", NULL},
    {"wipe", get_wipe, NULL,
     "True when all its memory is zeroed at the end: by wipe=True, or because it was begun in such a\n"
     "tick. C: arena_wipe.",
     NULL},
    {"trace", get_trace, NULL,
     "How many frames of each site it records; 0: none. C: arena_trace.", NULL},
    {"objects", get_objects, NULL,
     "True when large blocks of Python objects are captured while it is open.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot tick_slots[] = {
    {Py_tp_doc,
     "One scope: begins, allocates, ends. Made by arena.tick() and arena.begin().\n\n"
     "It belongs to the thread that began it; another thread gets WrongThreadError."},
    {Py_tp_dealloc, tick_dealloc},
    {Py_tp_finalize, tick_finalize},
    {Py_tp_traverse, tick_traverse},
    {Py_tp_clear, tick_clear},
    {Py_tp_repr, tick_repr},
    {Py_tp_call, tick_call},
    {Py_tp_methods, tick_methods},
    {Py_tp_getset, tick_getset},
    {0, NULL},
};

PyType_Spec arena_py_tick_spec = {
    .name = "arena.Tick",
    .basicsize = sizeof(Tick),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tick_slots,
};
