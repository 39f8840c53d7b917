/* module.c: puts the native types and functions into the module that cffi made. */
#include "py.h"

struct arena_py_lent arena_py_lent;

static const struct {
    const char *name;
    size_t offset;
} LENT[] = {
#define LENDS(name) {#name, offsetof(struct arena_py_lent, name)}
    LENDS(ArenaError), LENDS(StaleError), LENDS(ClosedError),  LENDS(TickError), LENDS(WrongThreadError),
    LENDS(LimitError), LENDS(EscapeError), LENDS(settle),    LENDS(thread_label),
    LENDS(decorate), LENDS(connect), LENDS(prepare), LENDS(trim),
#undef LENDS
};

/* _lend(**lent): the classes of arena.errors and the functions that only Python can write. */
static PyObject *lend(PyObject *unused, PyObject *args, PyObject *kwargs) {
    (void)unused;
    if (PyTuple_Size(args)) {
        PyErr_SetString(PyExc_TypeError, "_lend() takes keyword arguments only");
        return NULL;
    }
    for (size_t i = 0; i < sizeof LENT / sizeof *LENT; i++) {
        PyObject *value = kwargs ? PyDict_GetItemString(kwargs, LENT[i].name) : NULL;
        if (!value || !PyCallable_Check(value)) {
            PyErr_Format(PyExc_TypeError, "_lend() needs %s", LENT[i].name);
            return NULL;
        }
        PyObject **slot = (PyObject **)((char *)&arena_py_lent + LENT[i].offset);
        PyObject *old = *slot;
        *slot = Py_NewRef(value);
        Py_XDECREF(old);
    }
    Py_RETURN_NONE;
}

static PyObject *mod_tick(PyObject *unused, PyObject *const *args, Py_ssize_t count,
                          PyObject *names) {
    (void)unused;
    return arena_py_tick_new(args, count, names);
}

static PyObject *mod_begin(PyObject *unused, PyObject *const *args, Py_ssize_t count,
                           PyObject *names) {
    (void)unused;
    PyObject *tick = arena_py_tick_new(args, count, names);
    if (!tick) return NULL;
    if (Py_TYPE(tick) != arena_py_Tick) { /* a function was given, and decorated */
        Py_DECREF(tick);
        PyErr_SetString(PyExc_TypeError, "the name of a tick is a str or None, not a function");
        return NULL;
    }
    if (arena_py_tick_begin((Tick *)tick) == 0) return tick;
    Py_DECREF(tick);
    return NULL;
}

static PyObject *mod_current(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    Scope *scope = arena_py_scope_current();
    if (scope) return Py_NewRef((PyObject *)scope->face);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *mod_end(PyObject *unused, PyObject *unused2) {
    (void)unused, (void)unused2;
    Scope *scope = arena_py_scope_needed();
    if (!scope) return NULL;
    PyObject *tick = Py_NewRef((PyObject *)scope->face);
    PyObject *result = PyObject_CallMethod(tick, "end", NULL);
    Py_DECREF(tick);
    return result;
}

static PyObject *mod_alloc(PyObject *unused, PyObject *size) {
    (void)unused;
    Scope *scope = arena_py_scope_needed();
    return scope ? arena_py_block_new(scope, size) : NULL;
}

static PyObject *mod_strdup(PyObject *unused, PyObject *text) {
    (void)unused;
    Scope *scope = arena_py_scope_needed();
    return scope ? arena_py_str_new(scope, text, "strdup()") : NULL;
}

static PyObject *mod_strbuf(PyObject *unused, PyObject *const *args, Py_ssize_t count,
                            PyObject *names) {
    (void)unused;
    PyObject *initial;
    if (arena_py_one_optional("strbuf", "initial", args, count, names, &initial) < 0) return NULL;
    Scope *scope = arena_py_scope_needed();
    return scope ? arena_py_strbuf_new(scope, initial) : NULL;
}

static PyObject *mod_cleanup(PyObject *unused, PyObject *const *args, Py_ssize_t count,
                             PyObject *names) {
    (void)unused;
    Scope *scope = arena_py_scope_needed();
    return scope ? arena_py_cleanup_in(scope, args, count, names) : NULL;
}

static PyObject *mod_alloc_persist(PyObject *unused, PyObject *size) {
    (void)unused;
    return arena_py_block_new(NULL, size);
}

static PyObject *mod_strdup_persist(PyObject *unused, PyObject *text) {
    (void)unused;
    return arena_py_str_new(NULL, text, "strdup_persist()");
}

static PyObject *mod_strbuf_persist(PyObject *unused, PyObject *const *args, Py_ssize_t count,
                                    PyObject *names) {
    (void)unused;
    PyObject *initial;
    if (arena_py_one_optional("strbuf_persist", "initial", args, count, names, &initial) < 0)
        return NULL;
    return arena_py_strbuf_new(NULL, initial);
}

/* Returns the limit before. */
static PyObject *set_limit(PyObject *unused, PyObject *limit) {
    (void)unused;
    size_t bytes;
    arena_stats before;
    if (arena_py_limit(limit, &bytes) < 0) return NULL;
    arena_stats_get(&before);
    if (arena__process_limit(bytes, true) != ARENA_OK) {
        arena_stats_get(&before);
        PyErr_Format(PyExc_ValueError,
                     "the limit of the process cannot be %zu bytes: it holds %llu of scratch, %llu "
                     "persisted and %llu of strays already; free some first",
                     bytes, (unsigned long long)before.scratch, (unsigned long long)before.persisted,
                     (unsigned long long)before.strays);
        return NULL;
    }
    if (before.limit == UINT64_MAX) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(before.limit);
}

/* For Store. Keys are exactly str, so that nothing in here runs Python code. */
static PyObject *swap(PyObject *unused, PyObject *const *args, Py_ssize_t count) {
    (void)unused;
    if (count != 3 || !PyDict_CheckExact(args[0]) || !PyUnicode_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "_swap() takes a dict, a str and a value");
        return NULL;
    }
    PyObject *old = PyDict_GetItemWithError(args[0], args[1]);
    if (!old && PyErr_Occurred()) return NULL;
    old = Py_NewRef(old ? old : Py_None);
    if (PyDict_SetItem(args[0], args[1], args[2]) == 0) return old;
    Py_DECREF(old);
    return NULL;
}

#define FAST(fn) ((PyCFunction)(void (*)(void))(fn))

static PyMethodDef functions[] = {
    {"tick", FAST(mod_tick), METH_FASTCALL | METH_KEYWORDS,
     "tick(name=None, *, limit=None, escapes='allow', wipe=False, trace=0, objects=False)\n--\n\n"
     "A tick to open with `with`, or a decorator of def and async def functions.\n\n"
     "`limit` is the most bytes that it and the ticks inside of it may hold, as an int or as\n"
     "\"64 MiB\": exact to the byte, a StrBuf by its length. `escapes=\"raise\"` makes the end raise\n"
     "EscapeError when live views pin memory. `wipe=True` zeroes all its memory at the end; what a\n"
     "view pins, when the last view dies. `trace` records where things are allocated in it, that many\n"
     "frames (at most 32) of each place: see trace(). `objects=True` captures blocks of Python objects\n"
     "above 512 bytes while it is open, and reports those that outlive it: see escapes(). Each tick\n"
     "opens once; it belongs to the thread that opens it. Raises TypeError, ValueError, ImportError\n"
     "when objects cannot be captured here. C: arena_begin, arena_limit, arena_wipe, arena_trace."},
    {"begin", FAST(mod_begin), METH_FASTCALL | METH_KEYWORDS,
     "begin(name=None, *, limit=None, escapes='allow', wipe=False, trace=0, objects=False)\n--\n\n"
     "Open a tick at once; end it with its end(). Keep what this returns: a tick that nobody holds\n"
     "is ended with a ResourceWarning. Arguments and errors as tick(). C: arena_begin."},
    {"end", mod_end, METH_NOARGS,
     "end()\n--\n\n"
     "End the current tick, as its end() does, with its errors; TickError when none is open here.\n"
     "C: arena_end."},
    {"current", mod_current, METH_NOARGS,
     "current()\n--\n\n"
     "The innermost tick that is open in this context and thread, or None. Tasks and threads never\n"
     "see each other's. C: arena_current."},
    {"alloc", mod_alloc, METH_O, "alloc(size, /)\n--\n\n"
     "Tick.alloc() on the current tick: `size` zeroed bytes. TickError when none is open here.\n"
     "C: arena_zalloc with a NULL tick."},
    {"strdup", mod_strdup, METH_O, "strdup(text, /)\n--\n\n"
     "Tick.strdup() on the current tick. TickError when none is open here.\n"
     "C: arena_memdup with a NULL tick."},
    {"strbuf", FAST(mod_strbuf), METH_FASTCALL | METH_KEYWORDS,
     "strbuf(initial=None)\n--\n\n"
     "Tick.strbuf() on the current tick. TickError when none is open here.\n"
     "C: arena_strbuf_new with a NULL tick."},
    {"cleanup", FAST(mod_cleanup), METH_FASTCALL | METH_KEYWORDS,
     "cleanup(fn, /, *args, **kwargs)\n--\n\n"
     "Tick.cleanup() on the current tick. TickError when none is open here. C: arena_cleanup."},
    {"alloc_persist", mod_alloc_persist, METH_O,
     "alloc_persist(size, /)\n--\n\n"
     "A persisted Block of zeroed bytes: lives until free() or until the handle is collected.\n"
     "Any thread may use it. Raises MemoryError, TypeError, ValueError. C: arena_zalloc_persist."},
    {"strdup_persist", mod_strdup_persist, METH_O,
     "strdup_persist(text, /)\n--\n\n"
     "A persisted Str, as alloc_persist(), also of a handle; UnicodeEncodeError for a lone surrogate.\n"
     "C: arena_memdup_persist."},
    {"strbuf_persist", FAST(mod_strbuf_persist), METH_FASTCALL | METH_KEYWORDS,
     "strbuf_persist(initial=None)\n--\n\n"
     "A persisted StrBuf, as alloc_persist(). C: arena_strbuf_new_persist."},
    {"persist", arena_py_persist, METH_O,
     "persist(what, /)\n--\n\n"
     "Copy a handle out of its tick, as its persist(); a str or a bytes-like object becomes a Str.\n"
     "Raises StaleError, WrongThreadError, MemoryError, TypeError, UnicodeEncodeError. What it\n"
     "returns may be used by any thread. C: arena_memdup_persist."},
    {"set_limit", set_limit, METH_O,
     "set_limit(limit, /)\n--\n\n"
     "Set the most bytes that the process may hold: an int, \"1 GiB\", or None for no limit. Exact to\n"
     "the byte: what is asked for in open ticks of all threads, persisted memory and strays; pinned\n"
     "and cached chunks are not in it. What would pass it raises LimitError. Returns the limit\n"
     "before, or None. Any thread may call it. Raises TypeError, and ValueError when more is held\n"
     "already. C: arena_process_limit."},
    {"trim", FAST(arena_py_trim), METH_VARARGS | METH_KEYWORDS,
     "trim(budget_ms=None, keep='0 MiB', reason='asked for')\n--\n\n"
     "Give memory back to the operating system, and return a TrimResult.\n\n"
     "First arena's own cached chunks, until at most `keep` bytes are cached (an int, or \"64 MiB\"), then\n"
     "what is free inside the C heap. `budget_ms`, in milliseconds, is the most that it may take: the\n"
     "heap is left out when its walk is predicted to take longer, from how fast the walks before went.\n"
     "`reason` is for the log and the result. The GIL is released. While a heap is walked, threads that\n"
     "allocate from it wait, and so does fork(): some 100 to 270 ms for each GB of free pieces (see\n"
     "`python -m benchmarks trim`). At most one trim runs in the process: a call that comes meanwhile\n"
     "waits for it and returns its figures. It never calls gc.collect(). Where the allocator has no way\n"
     "to give back (`backend` is \"none\") only the cached chunks go. ARENA_TRIM=off in the environment\n"
     "leaves everything as it is. Any thread may call it. Raises TypeError, ValueError.\n"
     "C: arena_trim_all."},
    {"_trim", arena_py_trim_run, METH_VARARGS,
     "_trim(keep, budget, predicted, /)\n--\n\n"
     "Trim with the GIL released; nanoseconds. Returns the fields of arena_trimmed as a tuple."},
    {"_trim_is_idle", arena_py_trim_is_idle, METH_NOARGS,
     "_trim_is_idle()\n--\n\nWhether there is nothing that a trim could give back, without looking."},
    {"_trim_nothing", arena_py_trim_nothing, METH_O,
     "_trim_nothing(result, /)\n--\n\nWhat trim() returns where there is nothing to do, ever."},
    {"_heap_figures", arena_py_heap_figures, METH_NOARGS,
     "_heap_figures()\n--\n\n"
     "(backend, wraps, held, used, free, top, mmapped, pieces) of the C heap, None for what it does not\n"
     "tell; None while a trim runs. The GIL is released."},
    {"_heap_count", arena_py_heap_count, METH_NOARGS,
     "_heap_count()\n--\n\n"
     "How many heaps there are, -1 where that is not told; None while a trim runs. The GIL is released."},
    {"_heap_set", arena_py_heap_set, METH_VARARGS,
     "_heap_set(option, value, /)\n--\n\nmallopt(), where malloc is glibc's: whether it took it."},
    {"_small_objects", arena_py_small_objects, METH_NOARGS,
     "_small_objects()\n--\n\n"
     "What CPython says of its arenas, as a text; \"\" where it says nothing; None while a trim runs."},
    {"_size", FAST(arena_py_size_of), METH_FASTCALL,
     "_size(value, name, /)\n--\n\n"
     "Bytes of an int or of \"64 MiB\". TypeError and ValueError say what `name` is and was given."},
    {"_rows", arena_py_rows, METH_NOARGS,
     "_rows()\n--\n\nThe rows of the map of escapes, as dicts. For arena/escapes.py. C: arena_escapes."},
    {"_audit", arena_py_audit, METH_O,
     "_audit(budget, /)\n--\n\n"
     "Set how many bytes an audit keeps, None or 0 for none; returns what it was. C: arena_audit."},
    {"_own_folder", arena_py_sites_setup, METH_VARARGS,
     "_own_folder(folder, programs, /)\n--\n\n"
     "Where arena's own files are: no site is in them, but for those that are programs."},
    {"_sites_ready", arena_py_sites_ready, METH_NOARGS,
     "_sites_ready()\n--\n\nMake ready for the recording of sites; MemoryError."},
    {"_walker", arena_py_walker, METH_O,
     "_walker(address, /)\n--\n\nTake a faster way to read the frames of the running code."},
    {"_objects_host", arena_py_host, METH_NOARGS,
     "_objects_host()\n--\n\nThe address of what the objects module is lent."},
    {"_objects_connected", arena_py_connected, METH_O,
     "_objects_connected(address, /)\n--\n\nTake what the objects module lends."},
    {"_objects_always", arena_py_objects_always, METH_O,
     "_objects_always(on, /)\n--\n\nWhether ticks capture objects unless they say otherwise."},
    {"_swap", FAST(swap), METH_FASTCALL,
     "_swap(values, key, value, /)\n--\n\n"
     "Put a value into a dict and return the one it replaces, or None: one step for other threads."},
    {"_registry", arena_py_registry_new, METH_VARARGS,
     "_registry(name, limit, /)\n--\n\nWhat arena.Requests has in C."},
    {"_lend", FAST(lend), METH_VARARGS | METH_KEYWORDS,
     "_lend(**lent)\n--\n\nThe errors and helpers that the types use. For arena/_load.py."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **type) {
    if (!*type) *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type ? PyModule_AddObjectRef(module, name, (PyObject *)*type) : -1;
}

static int register_types(void) {
    static bool ready; /* an import that failed half-way is tried again, all of it */
    if (!ready) {
        PyObject *sys = PyImport_ImportModule("sys");
        if (sys) arena_py_lent.is_finalizing = PyObject_GetAttrString(sys, "is_finalizing");
        Py_XDECREF(sys);
        if (!arena_py_lent.is_finalizing || arena_py_scope_setup() < 0) return -1;
        ready = true;
    }
    /* A module that is imported again gets the types that there are. */
    PyObject *module = PyImport_ImportModule("arena._native");
    if (!module) return -1;
    int failed = add_type(module, "_Scope", &arena_py_scope_spec, &arena_py_Scope) ||
                 add_type(module, "Block", &arena_py_block_spec, &arena_py_Block) ||
                 add_type(module, "Str", &arena_py_str_spec, &arena_py_Str) ||
                 add_type(module, "StrBuf", &arena_py_strbuf_spec, &arena_py_StrBuf) ||
                 add_type(module, "Tick", &arena_py_tick_spec, &arena_py_Tick) ||
                 add_type(module, "_Registry", &arena_py_registry_spec, &arena_py_Registry) ||
                 add_type(module, "_Ending", &arena_py_ending_spec, &arena_py_Ending) ||
                 PyModule_AddFunctions(module, functions);
    Py_DECREF(module);
    return failed ? -1 : 0;
}

int arena_py_register(void) {
#ifdef ARENA_RELEASE_GIL
    /* Only then: in a sub-interpreter this would wait for the GIL that its own thread holds. */
    PyGILState_STATE state = PyGILState_Ensure();
#endif
    int failed = -2;
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) failed = register_types();
    if (failed == -1) PyErr_WriteUnraisable(NULL);
#ifdef ARENA_RELEASE_GIL
    PyGILState_Release(state);
#endif
    return failed;
}
