/* register.h: what the Python types add to the C API that cffi exposes. */
#ifndef ARENA_REGISTER_H
#define ARENA_REGISTER_H

/* cdef begin */

/* Adds the native types and functions to the module arena._native. 0; -1, and an exception is
 * printed; -2 in a sub-interpreter, where the types of the main one must not go. Called by
 * arena/_load.py. */
int arena_py_register(void);

/* 1 when a call through `lib` keeps the GIL, 0 when it does not, -1 when that cannot be known. */
int arena_py_gil_held(void);

/* cdef end */

#endif
