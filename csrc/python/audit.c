/* audit.c: ticks of Python that are over, but whose memory an audit keeps.
 *
 * A handle of such a tick works as before, and each use of it is noted. That is for the GIL to guard:
 * only a tick's end, and whoever turns the audit off, lets go of the oldest, and both hold it. The
 * memory of a tick that no handle can reach any more goes at once, whatever the budget: nobody can read
 * it, and the budget is for what somebody can.
 */
#include "py.h"

static Scope *oldest, *youngest;

static void let_go(Scope *scope) {
    *(scope->kept_prev ? &scope->kept_prev->kept_next : &oldest) = scope->kept_next;
    *(scope->kept_next ? &scope->kept_next->kept_prev : &youngest) = scope->kept_prev;
    arena__tick_release(&scope->tick);
}

static void keep_within(size_t budget) {
    while (oldest && arena__quarantined() > budget) let_go(oldest);
}

/* Ends the tick. Returns how many of its chunks live views pin. */
size_t arena_py_keep(Scope *scope) {
    size_t pinned = arena__tick_keep(&scope->tick);
    scope->kept_next = NULL;
    scope->kept_prev = youngest;
    if (youngest)
        youngest->kept_next = scope;
    else
        oldest = scope;
    youngest = scope;
    keep_within(arena_audit_now());
    return pinned;
}

/* Nothing refers to it any more. */
void arena_py_kept_gone(Scope *scope) {
    let_go(scope);
}

/* A use of a handle whose tick is kept. What earlier uses made it grow by counts for the budget, too. */
bool arena_py_use_kept(Handle *handle) {
    keep_within(arena_audit_now());
    if (arena__state(&handle->scope->tick) != ARENA__KEPT) return false;
    arena_py_note_use(handle);
    return true;
}

/* _audit(budget): bytes, or None. Returns the budget before. */
PyObject *arena_py_audit(PyObject *unused, PyObject *budget) {
    (void)unused;
    size_t bytes = 0, before = arena_audit_now();
    if (budget != Py_None && arena_py_limit(budget, &bytes) < 0) return NULL;
    if (arena_audit(bytes) != ARENA_OK) return PyErr_NoMemory();
    keep_within(bytes);
    return PyLong_FromSize_t(before);
}
