/* Replays a recorded call of an op: the steps that `record.py` has written down, without Python in between.

   A plan works on numbered tensors: first those that it is called with, then those that its steps make. A step

     EMPTY  allocates one,
     VIEW   makes one of another's memory, or
     CALL   calls a function, of PyTorch or of Triton's launcher, with tensors, their addresses and constants,

   and then lets go of the tensors that no later step reads, so that memory is free as early as in the recorded call.
   Most tensors never become Python objects: they are handles of libtorch's C functions, and a handle is made into an
   object only where a function or the caller takes it.

   Errors of PyTorch's functions reach the caller as they are. A plan changes nothing that existed before, so that a
   call that fails half-way has done no harm. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void *Handle; /* AtenTensorHandle: the address of an at::Tensor */

extern int32_t aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, Handle *made);
extern int32_t aoti_torch__reinterpret_tensor(Handle base, int64_t dim, const int64_t *sizes, const int64_t *strides,
                                              int64_t offset_from_base, Handle *made);
extern int32_t aoti_torch_get_data_ptr(Handle tensor, void **address);
extern int32_t aoti_torch_get_dtype(Handle tensor, int32_t *dtype);
extern int32_t aoti_torch_get_device_type(Handle tensor, int32_t *device_type);
extern int32_t aoti_torch_get_device_index(Handle tensor, int32_t *device_index);
extern int32_t aoti_torch_delete_tensor_object(Handle tensor);

/* THPVariable_Wrap(const at::TensorBase &), which makes a tensor into a Python object, by its name in the library */
extern PyObject *wrap(Handle tensor) __asm__("_Z16THPVariable_WrapRKN2at10TensorBaseE");

static PyObject *empty_strided; /* torch.empty_strided, for its exception */
static PyObject *tensor_type, *parameter_type, *shape_name;
static Py_ssize_t handle_offset; /* where a Python tensor holds its at::Tensor, in bytes */

/* A tensor of a call. An object holds the handle, if there is one; else the handle is ours. */
typedef struct {
    PyObject *object;
    Handle handle;
} Value;

/* How an argument is made: a constant, a tensor, a tensor's address, the current stream, or a list or tuple of such. */
enum { CONSTANT, TENSOR, ADDRESS, STREAM, LIST, TUPLE };

typedef struct Argument {
    int kind;
    int tensor;               /* TENSOR, ADDRESS */
    PyObject *object;         /* CONSTANT; STREAM: a function that returns it */
    Py_ssize_t count;         /* LIST, TUPLE */
    struct Argument *members; /* LIST, TUPLE */
} Argument;

enum { EMPTY, VIEW, CALL };

typedef struct {
    int kind;
    int *results; /* numbers of the tensors that it makes */
    int result_count;
    int *dead; /* numbers of the tensors that no later step reads */
    int dead_count;
    /* EMPTY, VIEW */
    int base;
    int64_t dim, *sizes, *strides, offset; /* of a view, from where its base begins, in elements */
    int32_t dtype, device_type, device_index;
    PyObject *like; /* EMPTY: keywords of torch.empty_strided */
    /* CALL */
    PyObject *function, *keywords; /* names of the last arguments, or NULL */
    Argument *arguments;
    int argument_count, has_sequence; /* whether the results come in a tuple or list */
} Step;

/* What an input has to be: nothing, a tensor, or a tensor at a multiple of 16, which launches were recorded for. */
enum { ANYTHING, A_TENSOR, AN_ALIGNED_TENSOR };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int input_count, tensor_count, step_count, output_count;
    const char *inputs;
    Step *steps;
    int *outputs;   /* numbers of tensors; -1 for None */
    PyObject *kept; /* a list of all memory and objects that the rest points to */
} Plan;

/* ---- tensors ---- */

static Handle handle_of(PyObject *tensor) { return (char *)tensor + handle_offset; }

static void let_go(Value *value) {
    if (value->object != NULL)
        Py_CLEAR(value->object);
    else if (value->handle != NULL)
        aoti_torch_delete_tensor_object(value->handle);
    value->handle = NULL;
}

/* Return the tensor as an object that the value owns, or NULL with an exception. */
static PyObject *object_of(Value *value) {
    if (value->object == NULL && (value->object = wrap(value->handle)) != NULL) {
        aoti_torch_delete_tensor_object(value->handle);
        value->handle = handle_of(value->object);
    }
    return value->object;
}

static void take(Value *value, PyObject *tensor) {
    value->object = Py_NewRef(tensor);
    value->handle = handle_of(tensor);
}

/* ---- steps ---- */

static PyObject *integers(const int64_t *values, int64_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (int64_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

static int run_empty(const Step *step, Value *values) {
    Value *made = &values[step->results[0]];
    if (aoti_torch_empty_strided(step->dim, step->sizes, step->strides, step->dtype, step->device_type,
                                 step->device_index, &made->handle) == 0)
        return 0;
    /* most likely there is no memory: PyTorch's own function says so, or finds some */
    made->handle = NULL;
    PyObject *sizes = integers(step->sizes, step->dim), *strides = integers(step->strides, step->dim);
    PyObject *arguments = sizes && strides ? PyTuple_Pack(2, sizes, strides) : NULL;
    PyObject *tensor = arguments ? PyObject_Call(empty_strided, arguments, step->like) : NULL;
    Py_XDECREF(arguments), Py_XDECREF(sizes), Py_XDECREF(strides);
    if (tensor == NULL)
        return -1;
    take(made, tensor);
    Py_DECREF(tensor);
    return 0;
}

static int run_view(const Step *step, Value *values) {
    Value *made = &values[step->results[0]];
    if (aoti_torch__reinterpret_tensor(values[step->base].handle, step->dim, step->sizes, step->strides, step->offset,
                                       &made->handle) == 0)
        return 0;
    made->handle = NULL;
    PyErr_SetString(PyExc_RuntimeError, "fastvit: libtorch made no view of a tensor");
    return -1;
}

static PyObject *make(const Argument *argument, Value *values);

static PyObject *make_sequence(const Argument *argument, Value *values) {
    PyObject *made = argument->kind == LIST ? PyList_New(argument->count) : PyTuple_New(argument->count);
    for (Py_ssize_t i = 0; made != NULL && i < argument->count; i++) {
        PyObject *member = make(&argument->members[i], values);
        if (member == NULL)
            Py_CLEAR(made);
        else if (argument->kind == LIST)
            PyList_SET_ITEM(made, i, member);
        else
            PyTuple_SET_ITEM(made, i, member);
    }
    return made;
}

/* Return a new reference to the argument, or NULL with an exception. */
static PyObject *make(const Argument *argument, Value *values) {
    switch (argument->kind) {
    case TENSOR:
        return Py_XNewRef(object_of(&values[argument->tensor]));
    case ADDRESS: {
        void *address = NULL;
        aoti_torch_get_data_ptr(values[argument->tensor].handle, &address);
        return PyLong_FromVoidPtr(address);
    }
    case STREAM:
        return PyObject_CallNoArgs(argument->object);
    case CONSTANT:
        return Py_NewRef(argument->object);
    default:
        return make_sequence(argument, values);
    }
}

static int keep_results(const Step *step, PyObject *result, Value *values) {
    if (!step->has_sequence) {
        if (step->result_count)
            take(&values[step->results[0]], result);
        return 0;
    }
    PyObject *sequence = PySequence_Fast(result, "fastvit: a function no longer returns a sequence");
    if (sequence == NULL)
        return -1;
    for (int i = 0; i < step->result_count; i++)
        if (step->results[i] >= 0)
            take(&values[step->results[i]], PySequence_Fast_GET_ITEM(sequence, i));
    Py_DECREF(sequence);
    return 0;
}

static int run_call(const Step *step, Value *values) {
    PyObject *arguments[step->argument_count + 1];
    Py_ssize_t made = 0, named = step->keywords ? PyTuple_GET_SIZE(step->keywords) : 0;
    for (; made < step->argument_count; made++)
        if ((arguments[made] = make(&step->arguments[made], values)) == NULL)
            break;
    PyObject *result = NULL;
    if (made == step->argument_count)
        result = PyObject_Vectorcall(step->function, arguments, made - named, step->keywords);
    while (made > 0)
        Py_DECREF(arguments[--made]);
    if (result == NULL)
        return -1;
    int failed = keep_results(step, result, values);
    Py_DECREF(result);
    return failed;
}

static PyObject *outputs_of(const Plan *plan, Value *values) {
    PyObject *outputs = PyTuple_New(plan->output_count);
    for (int i = 0; outputs != NULL && i < plan->output_count; i++) {
        PyObject *output = plan->outputs[i] < 0 ? Py_None : object_of(&values[plan->outputs[i]]);
        if (output == NULL)
            Py_CLEAR(outputs);
        else
            PyTuple_SET_ITEM(outputs, i, Py_NewRef(output));
    }
    return outputs;
}

/* plan(inputs: list) -> tuple of tensors and None; or None if an input is not what it has to be. The list is then as it
   was; else it is empty, so that what nobody else holds is freed as soon as no step reads it. */
static PyObject *replay(PyObject *self, PyObject *const *arguments, size_t flags, PyObject *keywords) {
    const Plan *plan = (Plan *)self;
    PyObject *inputs = PyVectorcall_NARGS(flags) == 1 && keywords == NULL ? arguments[0] : NULL, *outputs = NULL;
    if (inputs == NULL || !PyList_CheckExact(inputs) || PyList_GET_SIZE(inputs) != plan->input_count)
        return PyErr_Format(PyExc_TypeError, "a plan is called with a list of %d inputs", plan->input_count);
    Value values[plan->tensor_count + 1];
    memset(values, 0, sizeof(values));
    for (int i = 0; i < plan->input_count; i++) {
        PyObject *input = PyList_GET_ITEM(inputs, i);
        void *address = NULL;
        if (plan->inputs[i] == ANYTHING)
            continue;
        if ((PyObject *)Py_TYPE(input) != tensor_type && (PyObject *)Py_TYPE(input) != parameter_type)
            Py_RETURN_NONE;
        values[i].handle = handle_of(input);
        if (plan->inputs[i] == AN_ALIGNED_TENSOR &&
            (aoti_torch_get_data_ptr(values[i].handle, &address) || (uintptr_t)address % 16))
            Py_RETURN_NONE;
        values[i].object = input;
    }
    for (int i = 0; i < plan->input_count; i++)
        Py_XINCREF(values[i].object);
    int failed = PyList_SetSlice(inputs, 0, plan->input_count, NULL);
    for (const Step *step = plan->steps; !failed && step < plan->steps + plan->step_count; step++) {
        failed = step->kind == EMPTY ? run_empty(step, values)
                 : step->kind == VIEW ? run_view(step, values)
                                      : run_call(step, values);
        for (int i = 0; i < step->dead_count; i++)
            let_go(&values[step->dead[i]]);
    }
    if (!failed)
        outputs = outputs_of(plan, values);
    for (int i = 0; i < plan->tensor_count; i++)
        let_go(&values[i]);
    return outputs;
}

/* ---- making a plan ---- */

/* Return memory of zeros that lives as long as the plan, or NULL with an exception. */
static void *memory(Plan *plan, Py_ssize_t size) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (bytes == NULL || PyList_Append(plan->kept, bytes)) {
        Py_XDECREF(bytes);
        return NULL;
    }
    Py_DECREF(bytes); /* the list holds it */
    return memset(PyBytes_AS_STRING(bytes), 0, size);
}

/* Read a tuple of integers; return whether that failed. */
static int read_integers(Plan *plan, PyObject *tuple, int **values, int *count) {
    *count = (int)PyTuple_GET_SIZE(tuple);
    if ((*values = memory(plan, *count * sizeof(int))) == NULL)
        return -1;
    for (int i = 0; i < *count; i++)
        (*values)[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
    return 0;
}

static int64_t *read_extents(Plan *plan, PyObject *tuple) {
    int64_t *values = memory(plan, PyTuple_GET_SIZE(tuple) * sizeof(int64_t));
    for (Py_ssize_t i = 0; values != NULL && i < PyTuple_GET_SIZE(tuple); i++)
        values[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    return values;
}

/* Read a tuple of (kind, value). */
static Argument *read_arguments(Plan *plan, PyObject *tuple) {
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    Argument *arguments = memory(plan, count * sizeof(Argument));
    for (Py_ssize_t i = 0; arguments != NULL && i < count; i++) {
        Argument *argument = &arguments[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "iO", &argument->kind, &argument->object))
            return NULL;
        if ((argument->kind == CONSTANT || argument->kind == STREAM) && PyList_Append(plan->kept, argument->object))
            return NULL;
        if (argument->kind == TENSOR || argument->kind == ADDRESS) {
            argument->tensor = (int)PyLong_AsLong(argument->object);
        } else if (argument->kind == LIST || argument->kind == TUPLE) {
            argument->count = PyTuple_GET_SIZE(argument->object);
            if ((argument->members = read_arguments(plan, argument->object)) == NULL)
                return NULL;
        }
    }
    return arguments;
}

/* Read (kind, results, dead, ...); the rest as `record.py` makes it. Return whether that failed. */
static int read_step(Plan *plan, Step *step, PyObject *tuple) {
    PyObject *results, *dead, *rest, *sizes = NULL, *strides = NULL, *arguments = NULL;
    if (!PyArg_ParseTuple(tuple, "iO!O!O!", &step->kind, &PyTuple_Type, &results, &PyTuple_Type, &dead, &PyTuple_Type,
                          &rest) ||
        read_integers(plan, results, &step->results, &step->result_count) ||
        read_integers(plan, dead, &step->dead, &step->dead_count))
        return -1;
    if (step->kind == CALL) {
        if (!PyArg_ParseTuple(rest, "OO!Op", &step->function, &PyTuple_Type, &arguments, &step->keywords,
                              &step->has_sequence))
            return -1;
        if (PyList_Append(plan->kept, step->function) || PyList_Append(plan->kept, step->keywords))
            return -1;
        step->argument_count = (int)PyTuple_GET_SIZE(arguments);
        step->keywords = step->keywords == Py_None ? NULL : step->keywords;
        return (step->arguments = read_arguments(plan, arguments)) == NULL ? -1 : 0;
    }
    if (step->kind == EMPTY) {
        if (!PyArg_ParseTuple(rest, "O!O!(iii)O!", &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &step->dtype,
                              &step->device_type, &step->device_index, &PyDict_Type, &step->like) ||
            PyList_Append(plan->kept, step->like))
            return -1;
    } else if (!PyArg_ParseTuple(rest, "O!O!iL", &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &step->base,
                                 &step->offset)) {
        return -1;
    }
    step->dim = PyTuple_GET_SIZE(sizes);
    step->sizes = read_extents(plan, sizes);
    step->strides = read_extents(plan, strides);
    return step->sizes == NULL || step->strides == NULL ? -1 : 0;
}

/* Plan(inputs: bytes, tensors: int, steps: tuple, outputs: tuple) */
static PyObject *new_plan(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *inputs, *steps, *outputs;
    Plan *plan = (Plan *)type->tp_alloc(type, 0);
    if (plan == NULL)
        return NULL;
    plan->vectorcall = replay;
    if (!PyArg_ParseTuple(arguments, "O!iO!O!", &PyBytes_Type, &inputs, &plan->tensor_count, &PyTuple_Type, &steps,
                          &PyTuple_Type, &outputs) ||
        (plan->kept = Py_BuildValue("[O]", inputs)) == NULL ||
        read_integers(plan, outputs, &plan->outputs, &plan->output_count))
        goto failed;
    plan->inputs = PyBytes_AS_STRING(inputs);
    plan->input_count = (int)PyBytes_GET_SIZE(inputs);
    plan->step_count = (int)PyTuple_GET_SIZE(steps);
    if ((plan->steps = memory(plan, plan->step_count * sizeof(Step))) == NULL)
        goto failed;
    for (int i = 0; i < plan->step_count; i++)
        if (read_step(plan, &plan->steps[i], PyTuple_GET_ITEM(steps, i)))
            goto failed;
    return (PyObject *)plan;
failed:
    Py_DECREF(plan);
    return NULL;
}

static void delete_plan(PyObject *self) {
    Py_XDECREF(((Plan *)self)->kept);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject PlanType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "replay.Plan",
    .tp_basicsize = sizeof(Plan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Plan, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = new_plan,
    .tp_dealloc = delete_plan,
};

/* ---- finding what is kept of a call ---- */

enum { MOST_TENSORS = 64 };

/* Append the tensors in `argument` to the array, if it is built as `pattern` says: a type, for a tensor of that type or
   None; a list of one plain value; or a tuple of a type, for such a container, and the patterns of its members. */
static int matches(PyObject *pattern, PyObject *argument, PyObject **tensors, Py_ssize_t *count) {
    if (PyType_Check(pattern)) {
        int is_tensor = argument != Py_None;
        if ((PyObject *)Py_TYPE(argument) != pattern || (is_tensor && *count == MOST_TENSORS))
            return 0;
        if (is_tensor)
            tensors[(*count)++] = argument;
        return 1;
    }
    if (PyList_CheckExact(pattern)) {
        PyObject *value = PyList_GET_ITEM(pattern, 0);
        return Py_TYPE(value) == Py_TYPE(argument) && PyObject_RichCompareBool(value, argument, Py_EQ) == 1;
    }
    Py_ssize_t size = PyTuple_GET_SIZE(pattern) - 1;
    if ((PyObject *)Py_TYPE(argument) != PyTuple_GET_ITEM(pattern, 0) || PySequence_Fast_GET_SIZE(argument) != size)
        return 0;
    for (Py_ssize_t i = 0; i < size; i++)
        if (!matches(PyTuple_GET_ITEM(pattern, i + 1), PySequence_Fast_GET_ITEM(argument, i), tensors, count))
            return 0;
    return 1;
}

/* Return a list of the arguments' tensors, if they are like those that were kept. */
static PyObject *tensors_if_alike(PyObject *kept, PyObject *arguments, PyObject *options, PyObject *settings) {
    PyObject *tensors[MOST_TENSORS], *alike, *list;
    Py_ssize_t count = 0;
    if (!matches(PyTuple_GET_ITEM(kept, 1), options, tensors, &count) ||
        PyObject_RichCompareBool(PyTuple_GET_ITEM(kept, 2), settings, Py_EQ) != 1 ||
        !matches(PyTuple_GET_ITEM(kept, 0), arguments, tensors, &count))
        return NULL;
    alike = PyObject_Vectorcall(PyTuple_GET_ITEM(kept, 3), tensors, count, NULL);
    Py_XDECREF(alike);
    if (alike != Py_True || (list = PyList_New(count)) == NULL)
        return NULL;
    while (count-- > 0)
        PyList_SET_ITEM(list, count, Py_NewRef(tensors[count]));
    return list;
}

/* find(table, op, arguments, options, settings: function of the first tensor) -> what the table keeps of a call like
   this one, and a list of its tensors; or None. table: (op, shape of the first tensor) -> tuple of (patterns of
   arguments and options, settings, function that tells whether tensors are alike, what is kept). Whatever goes wrong is
   left to `begin`, which then looks at the arguments itself. */
static PyObject *find(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    PyObject *op = given[1], *arguments = given[2], *options = given[3], *x = Py_None, *result = NULL, *tensors;
    for (Py_ssize_t i = 0; x == Py_None && i < PyTuple_GET_SIZE(arguments); i++)
        x = PyTuple_GET_ITEM(arguments, i);
    PyObject *shape = PyObject_GetAttr(x, shape_name), *settings = NULL;
    PyObject *key = shape == NULL ? NULL : PyTuple_Pack(2, op, shape);
    PyObject *kept = key == NULL ? NULL : PyDict_GetItemWithError(given[0], key);
    Py_XINCREF(kept); /* while Python code runs, other threads may change the table */
    if (kept != NULL && (settings = PyObject_CallOneArg(given[4], x)) != NULL)
        for (Py_ssize_t i = 0; result == NULL && !PyErr_Occurred() && i < PyTuple_GET_SIZE(kept); i++)
            if ((tensors = tensors_if_alike(PyTuple_GET_ITEM(kept, i), arguments, options, settings)) != NULL) {
                result = PyTuple_Pack(2, PyTuple_GET_ITEM(PyTuple_GET_ITEM(kept, i), 4), tensors);
                Py_DECREF(tensors);
            }
    Py_XDECREF(kept), Py_XDECREF(settings), Py_XDECREF(key), Py_XDECREF(shape);
    if (result == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) /* such as KeyboardInterrupt */
            return NULL;
        PyErr_Clear();
    }
    return result == NULL ? Py_NewRef(Py_None) : result;
}

/* ---- the module ---- */

/* set_up(tensor, parameter type, empty_strided) -> whether it is known where a Python tensor holds its at::Tensor, which
   is a pointer to what `_cdata` says. */
static PyObject *set_up(PyObject *module, PyObject *arguments) {
    PyObject *tensor, *address;
    if (!PyArg_ParseTuple(arguments, "OOO", &tensor, &parameter_type, &empty_strided) ||
        (address = PyObject_GetAttrString(tensor, "_cdata")) == NULL)
        return NULL;
    void *implementation = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    tensor_type = Py_NewRef((PyObject *)Py_TYPE(tensor));
    Py_INCREF(parameter_type), Py_INCREF(empty_strided);
    Py_ssize_t end = Py_TYPE(tensor)->tp_basicsize - (Py_ssize_t)sizeof(void *);
    for (handle_offset = sizeof(PyObject); handle_offset <= end; handle_offset += sizeof(void *))
        if (*(void **)handle_of(tensor) == implementation)
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* placement(tensor) -> its dtype, device type and device index, as libtorch numbers them */
static PyObject *placement(PyObject *module, PyObject *tensor) {
    int32_t dtype, device_type, device_index;
    Handle handle = handle_of(tensor);
    if (aoti_torch_get_dtype(handle, &dtype) || aoti_torch_get_device_type(handle, &device_type) ||
        aoti_torch_get_device_index(handle, &device_index))
        return PyErr_Format(PyExc_RuntimeError, "fastvit: libtorch does not know where a tensor is");
    return Py_BuildValue("(iii)", dtype, device_type, device_index);
}

static PyMethodDef functions[] = {{"set_up", set_up, METH_VARARGS, NULL},
                                  {"placement", placement, METH_O, NULL},
                                  {"find", (PyCFunction)(void *)find, METH_FASTCALL, NULL},
                                  {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "replay", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_replay(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || (shape_name = PyUnicode_InternFromString("shape")) == NULL || PyType_Ready(&PlanType) ||
        PyModule_AddObjectRef(module, "Plan", (PyObject *)&PlanType))
        return NULL;
    return module;
}
