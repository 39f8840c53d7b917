/* scope.c: which tick is current in Python, and the record behind each begun tick.
 *
 * The current tick is kept in one context variable, so asyncio tasks and threads each see their
 * own. A begin sets it; an end leaves it alone: whoever looks skips the scopes that have ended and
 * finds the nearest open one around them. That is always right, also when interleaved tasks end
 * their ticks in any order (where resetting by token would put back a tick that is over), and it
 * halves what the variable costs: a set and a reset were 143-201 ns.
 *
 * PyContextVar_Get and _Set are public but outside the stable ABI. They are looked up by name at
 * import; where they are missing, the variable's own methods do the same, 60 ns slower.
 */
#include "py.h"

#include <dlfcn.h>

PyTypeObject *arena_py_Scope;

static PyObject *variable;  /* ContextVar holding a Scope */
static PyObject *var_get;   /* its bound methods */
static PyObject *var_set;

typedef int (*get_fn)(PyObject *, PyObject *, PyObject **);
typedef PyObject *(*set_fn)(PyObject *, PyObject *);
typedef int (*check_fn)(void);
static get_fn fast_get;
static set_fn fast_set;
static check_fn gil_check;

/* POSIX promises that a function fits into what dlsym returns; ISO C does not, hence the copy. */
static void look_up(const char *name, void *function, size_t size) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    memcpy(function, &symbol, size);
}

int arena_py_gil_held(void) {
    return gil_check ? gil_check() : -1;
}

static bool is_open_here(const Scope *scope) {
    return arena__state(&scope->tick) == ARENA__OPEN && arena_py_scope_mine(scope);
}

/* Lets go of the ended scopes around this one: what is over is looked at once, and ticks that
 * overlap without nesting do not chain all of their past together. Frees scopes only, so it runs no
 * Python code. */
static void skip_ended(Scope *scope) {
    Scope *above = scope->parent, *kept = above;
    while (kept && arena__is_over(&kept->tick)) kept = kept->parent;
    if (kept == above) return;
    Py_XINCREF((PyObject *)kept);
    scope->parent = kept;
    Py_DECREF((PyObject *)above);
}

/* The same for the scopes whose limits hold. They are all this thread's. */
static void skip_ended_around(Scope *scope) {
    Scope *above = scope->around, *kept = above;
    while (kept && arena__is_over(&kept->tick)) kept = kept->around;
    if (kept == above) return;
    Py_XINCREF((PyObject *)kept);
    scope->around = kept;
    scope->tick.below = kept ? &kept->tick : NULL;
    Py_DECREF((PyObject *)above);
}

/* Borrowed; NULL when no tick is open here, or with an exception set. `*last` is the nearest scope
 * that has not ended, also another thread's: a context may go to a thread and come back. */
static Scope *find_current(Scope **last) {
    PyObject *value = NULL;
    *last = NULL;
    if (fast_get) {
        if (fast_get(variable, Py_None, &value) < 0) return NULL;
    } else if (!(value = PyObject_CallFunctionObjArgs(var_get, Py_None, NULL))) {
        return NULL;
    }
    Scope *scope = Py_TYPE(value) == arena_py_Scope ? (Scope *)value : NULL;
    if (scope && arena__is_over(&scope->tick)) skip_ended(scope);
    while (scope && arena__is_over(&scope->tick)) scope = scope->parent;
    *last = scope;
    while (scope && !is_open_here(scope)) scope = scope->parent;
    Py_DECREF(value); /* an open scope is kept by its tick, and so are those around it */
    return scope;
}

Scope *arena_py_scope_current(void) {
    Scope *last;
    return find_current(&last);
}

/* As above, but no tick is an error. Its message names a tick that the context carries from
 * another thread: that is the usual reason. */
Scope *arena_py_scope_needed(void) {
    Scope *scope = arena_py_scope_current();
    if (scope || PyErr_Occurred()) return scope;
    PyObject *value = PyObject_CallFunctionObjArgs(var_get, Py_None, NULL);
    if (!value) return NULL;
    Scope *last = Py_TYPE(value) == arena_py_Scope ? (Scope *)value : NULL;
    if (last && !arena__is_over(&last->tick)) {
        PyObject *which = arena_py_describe(last);
        if (which && arena_py_scope_mine(last))
            PyErr_Format(arena_py_lent.TickError,
                         "%U is ending: its cleanups run, and it takes no more allocations", which);
        else if (which)
            PyErr_Format(arena_py_lent.TickError,
                         "no tick is open in this thread (%U belongs to the thread that began it): "
                         "open one with `with arena.tick():`",
                         which);
        Py_XDECREF(which);
    } else {
        PyErr_SetString(arena_py_lent.TickError,
                        "no tick is open here: open one with `with arena.tick():`, or use a "
                        "_persist call for what must live on");
    }
    Py_DECREF(value);
    return NULL;
}

/* For C code that allocates in the current tick while Python's is the inner one. Called from any
 * thread, with or without the GIL. */
static arena_tick *current_for_c(void) {
    if (!gil_check()) return NULL;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Scope *scope = arena_py_scope_current();
    PyErr_Restore(type, value, traceback);
    return scope ? &scope->tick : NULL;
}

/* Ended scopes kept for the next begins; the GIL guards them. Two are enough for a loop: the
 * context variable holds the last tick's while the next one begins. */
#define SPARES 16
static Scope *spares[SPARES];
static int spare_count;

static Scope *scope_alloc(void) {
    if (spare_count) return (Scope *)PyObject_Init((PyObject *)spares[--spare_count], arena_py_Scope);
    Scope *scope = PyObject_New(Scope, arena_py_Scope);
    if (scope) memset(&scope->tick, 0, sizeof scope->tick);
    return scope;
}

static ARENA__NOINLINE void undo(Scope *scope) {
    scope->face = NULL;
    (void)arena__tick_close(&scope->tick);
    Py_DECREF((PyObject *)scope);
}

/* A new open tick that is current from here on: a new reference, or NULL with an exception.
 *
 * The collector is held off while the variable is set. CPython 3.11 collects inside of allocations,
 * and what it finalizes may set the same variable: its tree would be freed while it is copied. */
Scope *arena_py_scope_begin(Tick *face, PyObject *name) {
    Scope *parent, *current = find_current(&parent);
    if (!parent && PyErr_Occurred()) return NULL;
    Py_XINCREF((PyObject *)parent);
    Scope *scope = scope_alloc();
    if (!scope) {
        Py_XDECREF((PyObject *)parent);
        return NULL;
    }
    if (parent) skip_ended(parent);
    scope->parent = parent;
    scope->face = face;
    Py_XINCREF(name);
    scope->name = name;
    scope->thread = PyThread_get_thread_ident();
    arena__tick_open(&scope->tick, current ? &current->tick : NULL);
    scope->around = NULL;
    if (ARENA__UNLIKELY(scope->tick.inside)) {
        scope->around = (Scope *)Py_NewRef((PyObject *)current);
        skip_ended_around(current);
    }
    scope->tick.below = scope->around ? &current->tick : NULL;
    scope->watched = scope->waits = false;

    int collects = PyGC_Disable();
    PyObject *token = fast_set ? fast_set(variable, (PyObject *)scope)
                               : PyObject_CallFunctionObjArgs(var_set, (PyObject *)scope, NULL);
    if (collects) PyGC_Enable();
    if (!token) {
        undo(scope);
        return NULL;
    }
    Py_DECREF(token);
    if (ARENA__UNLIKELY(face->special || arena__traced() || ARENA__LOAD(arena__named_pools)) &&
        arena_py_watch(scope, face) < 0) {
        undo(scope);
        return NULL;
    }
    return scope;
}

/* A new open tick that is never current, and no thread's: a request of the registry. */
Scope *arena_py_scope_apart(Tick *face, Registry *registry, PyObject *label) {
    Scope *scope = scope_alloc();
    if (!scope) return NULL;
    arena__group_open(&scope->tick, &((Registry *)Py_NewRef((PyObject *)registry))->group);
    scope->parent = scope->around = NULL;
    scope->face = face;
    scope->name = Py_NewRef(registry->name);
    scope->label = Py_NewRef(label);
    scope->thread = 0;
    scope->watched = scope->waits = false;
    if ((face->special || arena__traced() || ARENA__LOAD(arena__named_pools)) &&
        arena_py_watch(scope, face) < 0) {
        undo(scope);
        return NULL;
    }
    return scope;
}

/* In a loop and not by recursion: a chain of nested ticks may be 100,000 long. */
static void scope_dealloc(PyObject *self) {
    Scope *scope = (Scope *)self;
    PyTypeObject *type = Py_TYPE(self);
    while (scope) {
        Scope *parent = scope->parent;
        PyObject *around = (PyObject *)scope->around;
        PyObject *name = scope->name;
        if (ARENA__UNLIKELY(scope->watched)) arena_py_unwatch(scope);
        if (ARENA__UNLIKELY(scope->waits)) arena_py_wait_over(scope);
        if (ARENA__UNLIKELY(arena__state(&scope->tick) == ARENA__KEPT)) arena_py_kept_gone(scope);
        /* Of another thread: also when it has ended. Its sweep may be at it. */
        if (arena__state(&scope->tick) != ARENA__ENDED || !arena_py_scope_mine(scope))
            (void)arena__tick_close(&scope->tick);
        PyObject *registry = NULL, *label = NULL;
        if (ARENA__UNLIKELY(scope->tick.group != NULL)) {
            registry = (PyObject *)arena_py_registry_of(scope->tick.group);
            label = scope->label;
            scope->tick.group = NULL;
        }
        if (spare_count < SPARES)
            spares[spare_count++] = scope;
        else
            PyObject_Free(scope);
        Py_DECREF(type);
        Py_XDECREF(name);
        Py_XDECREF(label);
        Py_XDECREF(registry);
        Py_XDECREF(around); /* nearly always the parent too, so this is not its end */
        if (parent && Py_REFCNT((PyObject *)parent) > 1) {
            Py_DECREF(parent);
            parent = NULL;
        }
        scope = parent;
    }
}

static PyObject *scope_repr(PyObject *self) {
    PyObject *which = arena_py_describe((Scope *)self);
    if (!which) return NULL;
    PyObject *text = PyUnicode_FromFormat("<arena scope of %U>", which);
    Py_DECREF(which);
    return text;
}

static PyType_Slot scope_slots[] = {
    {Py_tp_dealloc, scope_dealloc},
    {Py_tp_repr, scope_repr},
    {Py_tp_doc, "What a context variable and the handles keep of a tick. Internal."},
    {0, NULL},
};

PyType_Spec arena_py_scope_spec = {
    .name = "arena._native._Scope",
    .basicsize = sizeof(Scope),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = scope_slots,
};

int arena_py_scope_setup(void) {
    look_up("PyContextVar_Get", &fast_get, sizeof fast_get);
    look_up("PyContextVar_Set", &fast_set, sizeof fast_set);
    look_up("PyGILState_Check", &gil_check, sizeof gil_check);
    PyObject *module = PyImport_ImportModule("contextvars");
    if (!module) return -1;
    variable = PyObject_CallMethod(module, "ContextVar", "s", "arena.tick");
    Py_DECREF(module);
    if (!variable) return -1;
    if (!(var_get = PyObject_GetAttrString(variable, "get"))) return -1;
    if (!(var_set = PyObject_GetAttrString(variable, "set"))) return -1;
    if (gil_check) arena__outer_current = current_for_c;
    return 0;
}
