/* errors.c: the one place that turns a code or a state into an exception. */
#include "py.h"

#include <stdio.h>

/* "tick 'awareness' (number 5)": a new reference. */
PyObject *arena_py_describe(Scope *scope) {
    unsigned long long number = scope->tick.number;
    if (scope->tick.group)
        return PyUnicode_FromFormat("request %U of %R (number %llu)", scope->label, scope->name, number);
    if (scope->name) return PyUnicode_FromFormat("tick %R (number %llu)", scope->name, number);
    return PyUnicode_FromFormat("tick number %llu", number);
}

void arena_py_raise_thread(Scope *scope, const char *what) {
    /* One after the other: nothing of Python may run while an exception is set. */
    PyObject *which = arena_py_describe(scope), *owner = NULL, *here = NULL;
    if (which) owner = PyObject_CallFunction(arena_py_lent.thread_label, "k", scope->thread);
    if (owner)
        here = PyObject_CallFunction(arena_py_lent.thread_label, "k", PyThread_get_thread_ident());
    if (here)
        PyErr_Format(arena_py_lent.WrongThreadError,
                     "%s%U belongs to thread %U and was used by thread %U: a tick stays in its "
                     "thread, persisted memory may cross",
                     what, which, owner, here);
    Py_XDECREF(which);
    Py_XDECREF(owner);
    Py_XDECREF(here);
}

/* For a tick that is not open, or not this thread's. */
void arena_py_raise_state(Scope *scope) {
    if (arena__is_over(&scope->tick)) {
        arena_py_raise(ARENA_E_ENDED, scope, 0);
    } else if (!arena_py_scope_mine(scope)) {
        arena_py_raise(ARENA_E_THREAD, scope, 0);
    } else {
        arena_py_raise(ARENA_E_ENDING, scope, 0);
    }
}

void arena_py_raise_unusable(Handle *handle) {
    arena_py_raise_unusable_as(handle, arena_py_lent.StaleError);
}

/* With `stale` for a handle whose memory is gone. */
void arena_py_raise_unusable_as(Handle *handle, PyObject *stale) {
    Scope *scope = handle->scope;
    const char *kind = Py_TYPE((PyObject *)handle) == arena_py_Block ? "Block"
                       : Py_TYPE((PyObject *)handle) == arena_py_Str ? "Str"
                                                         : "StrBuf";
    size_t size = arena_py_span(handle).size;
    if (!scope) {
        PyErr_Format(stale,
                     "this %s of %zu bytes was freed: by free(), or because its Store let go of it",
                     kind, size);
        return;
    }
    if (arena__state(&scope->tick) != ARENA__ENDED) {
        arena_py_raise_thread(scope, "scratch of ");
        return;
    }
    arena_py_note_use(handle);
    PyObject *which = arena_py_describe(scope), *sites = which ? arena_py_sites_of(handle) : NULL;
    unsigned long long ago = arena__ticks_begun() - scope->tick.number;
    char when[48] = "";
    if (ago) (void)snprintf(when, sizeof when, ", %llu tick%s ago", ago, ago == 1 ? "" : "s");
    if (sites)
        PyErr_Format(stale,
                     "this %s of %zu bytes belonged to %U, which has ended%s: persist() what must "
                     "outlive its tick%U",
                     kind, size, which, when, sites);
    Py_XDECREF(which);
    Py_XDECREF(sites);
}

/* Whose limit it was, and who asked: the core has noted it. */
static void raise_limit(Scope *scope) {
    size_t requested = arena__self.refusal.size;
    const arena_tick *by = arena__self.refusal.by;
    size_t used = arena__self.refusal.used, limit = arena__self.refusal.limit;
    PyObject *asking = scope ? arena_py_describe(scope) : PyUnicode_FromString("a persist call");
    PyObject *whose = NULL;
    if (by && !by->number) /* what stands for a tick around requests */
        whose = PyUnicode_FromFormat("the open requests of %R", arena_py_registry_of((const arena__group *)by)->name);
    else if (by) /* a tick of ours, for only those are around ours: it lies in its scope */
        whose = arena_py_describe((Scope *)((uintptr_t)by - offsetof(Scope, tick)));
    if (asking && scope && by == &scope->tick)
        PyErr_Format(arena_py_lent.LimitError,
                     "%U would pass its limit: %zu bytes requested, %zu used, %zu allowed", asking,
                     requested, used, limit);
    else if (asking && whose)
        PyErr_Format(arena_py_lent.LimitError,
                     "%U would pass %s limit: %zu bytes requested by %U, %zu used, %zu allowed",
                     whose, by->number ? "its" : "their", requested, asking, used, limit);
    else if (asking && !by)
        PyErr_Format(arena_py_lent.LimitError,
                     "the process would pass its limit (arena.set_limit()): %zu bytes requested by "
                     "%U, %zu used, %zu allowed",
                     requested, asking, used, limit);
    Py_XDECREF(asking);
    Py_XDECREF(whose);
}

/* `requested` matters for ARENA_E_NOMEM only. */
void arena_py_raise(int code, Scope *scope, size_t requested) {
    if (code == ARENA_E_LIMIT) {
        raise_limit(scope);
        return;
    }
    if (code == ARENA_E_NOMEM || !scope) {
        if (code == ARENA_E_NOMEM)
            PyErr_Format(PyExc_MemoryError, "no memory: %zu bytes requested", requested);
        else
            PyErr_SetString(arena_py_lent.ArenaError, arena_strerror(code));
        return;
    }
    if (code == ARENA_E_THREAD) {
        arena_py_raise_thread(scope, "");
        return;
    }
    PyObject *which = arena_py_describe(scope);
    if (!which) return;
    switch (code) {
    case ARENA_E_ENDED:
        PyErr_Format(arena_py_lent.TickError, "%U has ended already", which);
        break;
    case ARENA_E_ENDING:
        PyErr_Format(arena_py_lent.TickError,
                     "%U is ending: its cleanups run, and it takes no more work; what they need "
                     "may be read, not changed in size",
                     which);
        break;
    default:
        PyErr_Format(arena_py_lent.ArenaError, "%U: %s", which, arena_strerror(code));
        break;
    }
    Py_DECREF(which);
}
