/* stack.c: the running Python code, read where CPython keeps it.
 *
 * The public way makes a frame object for each frame that is looked at, some 60 ns each; a site of
 * eight frames is then dearer than the allocation that it is of. This file is compiled for one version
 * of CPython, so it may read the frames themselves. For versions whose frames it does not know it has
 * no walker, and the main module goes the public way.
 */
#if !defined(Py_BUILD_CORE)
#define Py_BUILD_CORE 1
#endif
#include <Python.h>

#include "objects.h"

#if PY_VERSION_HEX < 0x030E0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#include "internal/pycore_frame.h"
#pragma GCC diagnostic pop

/* The code object and the offset in bytes of the instruction, of up to `depth` frames, innermost first.
 * With the GIL. Returns the number of frames. */
static uint32_t walk(uintptr_t *key, uint32_t depth) {
    const PyThreadState *state = PyThreadState_Get();
#if PY_VERSION_HEX < 0x030D0000
    _PyInterpreterFrame *frame = state->cframe->current_frame;
#else
    _PyInterpreterFrame *frame = state->current_frame;
#endif
    uint32_t found = 0;
    for (; frame && found < depth; frame = frame->previous) {
        if (_PyFrame_IsIncomplete(frame)) continue; /* its call has not begun */
#if PY_VERSION_HEX < 0x030D0000
        PyCodeObject *code = frame->f_code;
        ptrdiff_t at = frame->prev_instr - _PyCode_CODE(code);
#else
        PyCodeObject *code = _PyFrame_GetCode(frame);
        ptrdiff_t at = frame->instr_ptr - _PyCode_CODE(code);
#endif
        key[2 * found] = (uintptr_t)code;
        key[2 * found + 1] = (uintptr_t)at * sizeof(_Py_CODEUNIT);
        found++;
    }
    return found;
}

const void *arena_objects_walker(void) {
    uint32_t (*walker)(uintptr_t *, uint32_t) = walk;
    const void *address;
    memcpy(&address, &walker, sizeof address);
    return address;
}
#else
const void *arena_objects_walker(void) {
    return NULL;
}
#endif
