/* requests.c: what Requests needs of C: ticks that are no thread's and never current, what they are
 * counted by, and steps that no signal and no other thread can come into the middle of.
 *
 * No thread's, because a request is opened by a server's event loop, filled by a worker and given up by
 * whoever notices first. That is sound for the same reason as code that a call runs on its way, which may
 * end the very tick too: each call of the native types holds the GIL, and looks at the state again after
 * all that may have let go of it.
 *
 * In one step, because whoever waits for a request waits for ever if its end is lost: Python raises what
 * a signal's handler raises between any two lines, also of an __exit__ that is written in Python.
 */
#include "py.h"

PyTypeObject *arena_py_Registry, *arena_py_Ending;

/* ---- The registry ----------------------------------------------------------------------------- */

/* _registry(name, limit) */
PyObject *arena_py_registry_new(PyObject *unused, PyObject *args) {
    (void)unused;
    PyObject *name, *limit;
    size_t bytes;
    if (!PyArg_ParseTuple(args, "UO:_registry", &name, &limit)) return NULL;
    if (arena_py_limit(limit, &bytes) < 0) return NULL;
    Registry *registry = PyObject_New(Registry, arena_py_Registry);
    if (!registry) return NULL;
    arena__group_init(&registry->group, bytes);
    registry->opened = registry->discarded = registry->swept = 0;
    registry->closed = false;
    registry->name = PyUnicode_FromObject(name); /* exactly a str: see Scope */
    if (registry->name) return (PyObject *)registry;
    Py_DECREF((PyObject *)registry);
    return NULL;
}

static void registry_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Registry *)self)->name);
    PyObject_Free(self);
    Py_DECREF(type);
}

static int check_closed(const Registry *registry) {
    if (!registry->closed) return 0;
    PyErr_Format(arena_py_lent.TickError, "the registry %R is closed: it opens no more requests",
                 registry->name);
    return -1;
}

/* Puts it in, unless the key is taken; returns what is there then. The new entry's own end takes it out
 * again, the last of its cleanups. */
static PyObject *enter(PyObject *self, PyObject *open, PyObject *key, PyObject *request, PyObject *tick) {
    PyObject *over = PyObject_GetAttrString(self, "_over"), *added = NULL, *there = NULL;
    if (over && PyObject_SetAttrString(request, "tick", tick) == 0)
        added = PyObject_CallMethod(tick, "cleanup", "OOOOO", over, open, key, request, tick);
    if (added && check_closed((Registry *)self) == 0)
        there = PyObject_CallMethod(open, "setdefault", "OO", key, request);
    if (there == request) ((Registry *)self)->opened++;
    Py_XDECREF(over);
    Py_XDECREF(added);
    return there;
}

static PyObject *registry_open(PyObject *self, PyObject *args) {
    PyObject *open, *key, *request, *label, *limit;
    size_t bytes;
    if (!PyArg_ParseTuple(args, "O!OOUO:open", &PyDict_Type, &open, &key, &request, &label, &limit))
        return NULL;
    if (arena_py_limit(limit, &bytes) < 0 || PyObject_Hash(key) == -1) return NULL;
    PyObject *tick = (PyObject *)arena_py_tick_apart((Registry *)self, label, bytes);
    if (!tick) return NULL;
    PyObject *there = enter(self, open, key, request, tick);
    if (there != request) { /* without a word, as if it had never been */
        Py_CLEAR(((Tick *)tick)->cleanups);
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (arena_py_tick_end((Tick *)tick, NULL) < 0) PyErr_WriteUnraisable(tick);
        PyErr_Restore(type, value, traceback);
    }
    Py_DECREF(tick);
    return there;
}

/* _over(open, key, request, tick): a cleanup, and the last one. Counts what was entered. */
static PyObject *registry_over(PyObject *self, PyObject *args) {
    PyObject *open, *key, *request, *tick;
    Registry *registry = (Registry *)self;
    if (!PyArg_ParseTuple(args, "O!OOO!:_over", &PyDict_Type, &open, &key, &request, arena_py_Tick, &tick))
        return NULL;
    if (((Tick *)tick)->swept)
        registry->swept++;
    else
        registry->discarded++;
    /* Not there: the key has changed since it was put in, and is lost in the dict. */
    if (PyDict_GetItemWithError(open, key) == request) (void)PyDict_DelItem(open, key);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Nothing between the look at the state and the start of the end runs anybody's code: of several who
 * end a request one does it, and the others are told that there was nothing to do. */
static PyObject *registry_end(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *tick, *body;
    if (!PyArg_ParseTuple(args, "O!O:end", arena_py_Tick, &tick, &body)) return NULL;
    if (!arena_py_tick_is_open((Tick *)tick)) Py_RETURN_FALSE;
    if (arena_py_tick_end((Tick *)tick, body == Py_None ? NULL : body) < 0) return NULL;
    Py_RETURN_TRUE;
}

/* All that may fail, before the first of them ends. */
static PyObject *ticks_of(PyObject *requests) {
    Py_ssize_t count = PyList_Size(requests);
    PyObject *ticks = PyList_New(0);
    for (Py_ssize_t i = 0; ticks && i < count; i++) {
        PyObject *tick = PyObject_GetAttrString(PyList_GetItem(requests, i), "tick");
        if (!tick || PyList_Append(ticks, tick) < 0) Py_CLEAR(ticks);
        Py_XDECREF(tick);
    }
    return ticks;
}

/* A list of so many False. Never one with holes, which the collector would show to others. */
static PyObject *all_false(Py_ssize_t count) {
    PyObject *list = PyList_New(0);
    while (list && PyList_Size(list) < count)
        if (PyList_Append(list, Py_False) < 0) Py_CLEAR(list);
    return list;
}

/* The exception that is set is one of the failures; told and not lost where there is no memory to
 * keep it. */
static void keep_failure(PyObject *failures, PyObject *whose) {
    PyObject *error = arena_py_take_exception();
    if (!error || PyList_Append(failures, error) < 0) {
        if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        PyErr_WriteUnraisable(whose);
    }
    Py_XDECREF(error);
}

/* Ends those of the ticks that are open. A new list that says for each whether it was. */
static PyObject *sweep(PyObject *ticks, PyObject *body, PyObject *failures) {
    Py_ssize_t count = PyList_Size(ticks);
    PyObject *done = all_false(count);
    for (Py_ssize_t i = 0; done && i < count; i++) {
        PyObject *tick = Py_XNewRef(PyList_GetItem(ticks, i));
        if (tick && Py_TYPE(tick) == arena_py_Tick && arena_py_tick_is_open((Tick *)tick)) {
            (void)PyList_SetItem(done, i, Py_NewRef(Py_True));
            ((Tick *)tick)->swept = true;
            if (arena_py_tick_end((Tick *)tick, body) < 0) keep_failure(failures, tick);
        }
        Py_XDECREF(tick);
    }
    return done;
}

/* (for each request whether it was open, what to raise or None). Takes over both lists, which may be
 * NULL with an exception set. */
static PyObject *settled(PyObject *requests, PyObject *failures, PyObject *what, PyObject *body) {
    PyObject *ticks = requests && failures ? ticks_of(requests) : NULL, *result = NULL, *error = NULL;
    PyObject *done = ticks ? sweep(ticks, body == Py_None ? NULL : body, failures) : NULL;
    if (done) error = PyObject_CallFunctionObjArgs(arena_py_lent.settle, what, failures, Py_None, body, NULL);
    if (error) result = PyTuple_Pack(2, done, error);
    Py_XDECREF(requests);
    Py_XDECREF(failures);
    Py_XDECREF(ticks);
    Py_XDECREF(done);
    Py_XDECREF(error);
    return result;
}

static PyObject *registry_sweep(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *requests, *what, *body;
    if (!PyArg_ParseTuple(args, "O!UO:sweep", &PyList_Type, &requests, &what, &body)) return NULL;
    return settled(Py_NewRef(requests), PyList_New(0), what, body);
}

/* The requests of a group are ended. To compare may run code: that fails, or ends some. No index: it
 * would have to be mended on every way out, and one pass for each group is microseconds for a thousand. */
static PyObject *close_group(PyObject *open, PyObject *group, PyObject *what, PyObject *body) {
    PyObject *all = PyDict_Values(open), *found = all ? PyList_New(0) : NULL;
    PyObject *failures = found ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; failures && i < PyList_Size(all); i++) {
        PyObject *request = PyList_GetItem(all, i), *its = PyObject_GetAttrString(request, "group");
        int same = its ? PyObject_RichCompareBool(its, group, Py_EQ) : -1;
        if (its && same < 0) /* that of the others is theirs */
            keep_failure(failures, request);
        else if (same < 0 || (same && PyList_Append(found, request) < 0))
            Py_CLEAR(failures);
        Py_XDECREF(its);
    }
    Py_XDECREF(all);
    return settled(found, failures, what, body);
}

static PyObject *registry_close_group(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *open, *group, *what;
    if (!PyArg_ParseTuple(args, "O!OU:close_group", &PyDict_Type, &open, &group, &what)) return NULL;
    return close_group(open, group, what, Py_None);
}

static PyObject *registry_close(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Registry *)self)->closed = true;
    Py_RETURN_NONE;
}

static PyObject *registry_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    const Registry *registry = (Registry *)self;
    arena__lock();
    unsigned long long pinned = registry->group.pinned, count = registry->group.pinned_count;
    arena__unlock();
    return Py_BuildValue("KKKKK", registry->opened, registry->discarded, registry->swept, pinned, count);
}

static PyObject *registry_limit(PyObject *self, void *unused) {
    (void)unused;
    size_t limit = ((Registry *)self)->group.around.cap;
    if (limit == ARENA__UNLIMITED) Py_RETURN_NONE;
    return PyLong_FromSize_t(limit);
}

static PyMethodDef registry_methods[] = {
    {"open", registry_open, METH_VARARGS,
     "open($self, values, key, request, label, limit, /)\n--\n\n"
     "Give the request a new tick and put it in; return it, or the one that is there already."},
    {"_over", registry_over, METH_VARARGS, NULL},
    {"end", registry_end, METH_VARARGS,
     "end($self, tick, body, /)\n--\n\n"
     "End it if it is open, and say so. What its cleanups raise becomes notes of `body`, if any."},
    {"sweep", registry_sweep, METH_VARARGS,
     "sweep($self, requests, what, body, /)\n--\n\n"
     "End all that are open, whatever fails: (for each whether it was open, what to raise or None)."},
    {"close_group", registry_close_group, METH_VARARGS,
     "close_group($self, values, group, what, /)\n--\n\nsweep() of the requests of a group."},
    {"close", registry_close, METH_NOARGS, "close($self, /)\n--\n\nOpen no more."},
    {"figures", registry_figures, METH_NOARGS,
     "figures($self, /)\n--\n\n(opened, discarded, swept, pinned bytes, pinned chunks)"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef registry_getset[] = {
    {"limit", registry_limit, NULL, "The most bytes that all its open requests may hold, or None.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot registry_slots[] = {
    {Py_tp_doc, "What arena.Requests has in C. Internal."},
    {Py_tp_dealloc, registry_dealloc},
    {Py_tp_methods, registry_methods},
    {Py_tp_getset, registry_getset},
    {0, NULL},
};

PyType_Spec arena_py_registry_spec = {
    .name = "arena._native._Registry",
    .basicsize = sizeof(Registry),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = registry_slots,
};

/* ---- The way out of a `with` ------------------------------------------------------------------ */

/* Of a delivery: ends the request that was there at the start. Of a group: ends what is open of it. */
typedef struct Ending {
    PyObject_HEAD
    PyObject *open;    /* owned: dict */
    PyObject *what;    /* owned: a key, or a group */
    PyObject *label;   /* owned: how a group is told; NULL: this is a delivery */
    PyObject *tick;    /* owned, of a delivery: NULL before the start */
} Ending;

static int ending_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Ending *ending = (Ending *)self;
    PyObject *open, *what, *label = NULL;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O|U:_Ending", &PyDict_Type, &open, &what, &label)) return -1;
    if (ending->open) return 0;
    ending->open = Py_NewRef(open);
    ending->what = Py_NewRef(what);
    ending->label = Py_XNewRef(label);
    return 0;
}

static int ending_traverse(PyObject *self, visitproc visit, void *arg) {
    Ending *ending = (Ending *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(ending->open);
    Py_VISIT(ending->what);
    Py_VISIT(ending->tick);
    return 0;
}

static int ending_clear(PyObject *self) {
    Ending *ending = (Ending *)self;
    Py_CLEAR(ending->open);
    Py_CLEAR(ending->what);
    Py_CLEAR(ending->label);
    Py_CLEAR(ending->tick);
    return 0;
}

static void ending_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    (void)ending_clear(self);
    release(self);
    Py_DECREF(type);
}

static PyObject *ending_enter(PyObject *self, PyObject *unused) {
    (void)unused;
    Ending *ending = (Ending *)self;
    if (ending->label || !ending->open) return Py_NewRef(self);
    PyObject *request = PyDict_GetItemWithError(ending->open, ending->what), *before = ending->tick;
    if (!request) {
        PyObject *one = PyErr_Occurred() ? NULL : PyTuple_Pack(1, ending->what); /* a key may be a tuple */
        if (one) PyErr_SetObject(PyExc_KeyError, one);
        Py_XDECREF(one);
        return NULL;
    }
    PyObject *tick = PyObject_GetAttrString(Py_NewRef(request), "tick");
    if (!tick || Py_TYPE(tick) != arena_py_Tick) {
        if (tick) PyErr_SetString(PyExc_TypeError, "the tick of a request was replaced");
        Py_XDECREF(tick);
        Py_DECREF(request);
        return NULL;
    }
    ending->tick = tick;
    Py_XDECREF(before);
    return request;
}

static int leave(const Ending *ending, PyObject *body) {
    PyObject *result = close_group(ending->open, ending->what, ending->label, body ? body : Py_None);
    PyObject *error = result ? PyTuple_GetItem(result, 1) : NULL;
    if (error && error != Py_None) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(result);
    return PyErr_Occurred() ? -1 : 0;
}

static int deliver(const Ending *ending, PyObject *body) {
    if (!ending->tick || !arena_py_tick_is_open((Tick *)ending->tick)) return 0;
    PyObject *tick = Py_NewRef(ending->tick); /* callbacks may let go of this object */
    int failed = arena_py_tick_end((Tick *)tick, body);
    Py_DECREF(tick);
    return failed;
}

static int ending_leave(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Ending *ending = (Ending *)self;
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "the end of a `with` takes 3 arguments (%zd given)", count);
        return -1;
    }
    PyObject *body = args[1] == Py_None ? NULL : args[1];
    if (!ending->open) return 0;
    return ending->label ? leave(ending, body) : deliver(ending, body);
}

static PyObject *ending_exit(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (ending_leave(self, args, count) < 0) return NULL;
    Py_RETURN_NONE;
}

/* All is done at the call. What is awaited then is at its end already. */
static PyObject *ending_aexit(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return ending_leave(self, args, count) < 0 ? NULL : Py_NewRef(self);
}

static PyObject *ending_await(PyObject *self) {
    (void)self;
    PyObject *nothing = PyTuple_New(0);
    if (!nothing) return NULL;
    PyObject *iterator = PyObject_GetIter(nothing);
    Py_DECREF(nothing);
    return iterator;
}

static PyMethodDef ending_methods[] = {
    {"__enter__", ending_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))ending_exit, METH_FASTCALL, NULL},
    {"__aexit__", (PyCFunction)(void (*)(void))ending_aexit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ending_slots[] = {
    {Py_tp_doc, "The way out of a `with` of Requests. Internal."},
    {Py_tp_init, ending_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, ending_dealloc},
    {Py_tp_traverse, ending_traverse},
    {Py_tp_clear, ending_clear},
    {Py_am_await, ending_await},
    {Py_tp_methods, ending_methods},
    {0, NULL},
};

PyType_Spec arena_py_ending_spec = {
    .name = "arena._native._Ending",
    .basicsize = sizeof(Ending),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ending_slots,
};
