/* requests.c: what a registry of requests needs of C: ticks that are no thread's and never current,
 * what they are counted by, and ends that happen once whoever comes first.
 *
 * No thread's, because a request is opened by a server's event loop, filled by a worker and given up by
 * whoever notices first. That is sound for the same reason as code that a call runs on its way, which may
 * end the very tick too: each call of the native types holds the GIL, and looks at the state again after
 * all that may have let go of it.
 */
#include "py.h"

PyTypeObject *arena_py_Registry;

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
    registry->opened = registry->swept = 0;
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

static PyObject *registry_open(PyObject *self, PyObject *args) {
    PyObject *label, *limit;
    size_t bytes;
    if (!PyArg_ParseTuple(args, "UO:open", &label, &limit)) return NULL;
    if (arena_py_limit(limit, &bytes) < 0) return NULL;
    Registry *registry = (Registry *)self;
    PyObject *tick = (PyObject *)arena_py_tick_apart(registry, label, bytes);
    if (tick) registry->opened++;
    return tick;
}

/* One that was opened in vain: another thread has taken its key. */
static PyObject *registry_undo(PyObject *self, PyObject *tick) {
    if (Py_TYPE(tick) != arena_py_Tick || !arena_py_tick_is_open((Tick *)tick)) Py_RETURN_NONE;
    ((Registry *)self)->opened--;
    return PyObject_CallMethod(tick, "end", NULL);
}

/* Nothing between the look at the state and the start of the end runs anybody's code: of several who
 * end a request one does it, and the others are told that there was nothing to do. */
static PyObject *registry_end(PyObject *self, PyObject *args) {
    PyObject *tick, *body;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O:end", arena_py_Tick, &tick, &body)) return NULL;
    if (!arena_py_tick_is_open((Tick *)tick)) Py_RETURN_FALSE;
    if (arena_py_tick_end((Tick *)tick, body == Py_None ? NULL : body) < 0) return NULL;
    Py_RETURN_TRUE;
}

/* A loop in C: between two turns of one in Python a signal may raise, and leave the rest waiting. */
static PyObject *registry_sweep(PyObject *self, PyObject *args) {
    PyObject *given, *body;
    if (!PyArg_ParseTuple(args, "O!O:sweep", &PyList_Type, &given, &body)) return NULL;
    PyObject *ticks = PyList_AsTuple(given); /* which nobody changes meanwhile */
    if (!ticks) return NULL;
    Py_ssize_t count = PyTuple_Size(ticks);
    PyObject *done = PyList_New(count), *failures = done ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; failures && i < count; i++) {
        Tick *tick = (Tick *)PyTuple_GetItem(ticks, i);
        bool open = Py_TYPE((PyObject *)tick) == arena_py_Tick && arena_py_tick_is_open(tick);
        (void)PyList_SetItem(done, i, Py_NewRef(open ? Py_True : Py_False));
        if (!open) continue;
        ((Registry *)self)->swept++;
        if (arena_py_tick_end(tick, body == Py_None ? NULL : body) == 0) continue;
        PyObject *error = arena_py_take_exception();
        if (!error || PyList_Append(failures, error) < 0) { /* no memory to keep it: told, not lost */
            if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
            PyErr_WriteUnraisable((PyObject *)tick);
        }
        Py_XDECREF(error);
    }
    PyObject *result = failures ? PyTuple_Pack(2, done, failures) : NULL;
    Py_DECREF(ticks);
    Py_XDECREF(done);
    Py_XDECREF(failures);
    return result;
}

static PyObject *registry_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    const Registry *registry = (Registry *)self;
    arena__lock();
    unsigned long long pinned = registry->group.pinned, count = registry->group.pinned_count;
    arena__unlock();
    return Py_BuildValue("KKKK", registry->opened, registry->swept, pinned, count);
}

static PyObject *registry_limit(PyObject *self, void *unused) {
    (void)unused;
    size_t limit = ((Registry *)self)->group.around.cap;
    if (limit == ARENA__UNLIMITED) Py_RETURN_NONE;
    return PyLong_FromSize_t(limit);
}

/* _drop(dict, key, value): takes the key out if it has that value; nothing else can come in between
 * unless a key's own comparison does. */
PyObject *arena_py_drop(PyObject *unused, PyObject *args) {
    (void)unused;
    PyObject *dict, *key, *value;
    if (!PyArg_ParseTuple(args, "O!OO:_drop", &PyDict_Type, &dict, &key, &value)) return NULL;
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == value) {
        if (PyDict_DelItem(dict, key) < 0) return NULL;
    } else if (!found && PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef registry_methods[] = {
    {"open", registry_open, METH_VARARGS, "open($self, label, limit, /)\n--\n\nA new tick, open."},
    {"undo", registry_undo, METH_O, "undo($self, tick, /)\n--\n\nEnd it as if it had never been."},
    {"end", registry_end, METH_VARARGS,
     "end($self, tick, body, /)\n--\n\n"
     "End it if it is open, and say so. What its cleanups raise becomes notes of `body`."},
    {"sweep", registry_sweep, METH_VARARGS,
     "sweep($self, ticks, body, /)\n--\n\n"
     "End all that are open, whatever fails: (for each whether it was open, what was raised)."},
    {"figures", registry_figures, METH_NOARGS,
     "figures($self, /)\n--\n\n(opened, swept, pinned bytes, pinned chunks)"},
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
