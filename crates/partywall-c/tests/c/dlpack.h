/* The structs of dlpack.h 1.1, under their own names: the header of a library that includes both. */
typedef struct {
    uint32_t major;
    uint32_t minor;
} DLPackVersion;

typedef struct {
    int32_t device_type;
    int32_t device_id;
} DLDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

static int deleted;

static inline void count_deleted(DLManagedTensorVersioned *self) {
    CHECK(self->manager_ctx == &deleted);
    deleted++;
}

/* A tensor of float32, of one dimension. */
static inline DLManagedTensorVersioned floats(void *data, int32_t device, int64_t *length) {
    DLManagedTensorVersioned made = {.version = {1, 1}, .manager_ctx = &deleted, .deleter = count_deleted};
    made.dl_tensor = (DLTensor){.data = data, .device = {device, 0}, .ndim = 1, .dtype = {2, 32, 1}, .shape = length};
    return made;
}
