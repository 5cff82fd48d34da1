/* A stand-in for libnvidia-ml.so.1: the C interface of the real one, told by a text file what to answer.
 *
 * NVML_STAND_IN names the file when NVML is initialised. Its lines are `key=value`; it is read again whenever it has
 * changed, so a test can let a GPU fall off the bus while somebody looks at it.
 *
 *   count=2                      GPUs; gpu0.* tells of the first: a figure that is not told is not supported
 *   gpu0.uuid=GPU-...            also: bus name util memory_util used reserved total temperature power power_limit sm
 *                                sm_max memory_clock memory_clock_max throttle pcie_tx pcie_rx nvlink_tx nvlink_rx
 *                                ecc_corrected ecc_uncorrected event_types
 *   gpu0.processes=12:4096,15:-  process:bytes; `-` = not told
 *   gpu0.mig=2                   instances; gpu0.mig0.* tells of the first: uuid gi ci used total processes
 *   return.<function>=4          what a function returns; return.gpu0.<function> of one GPU, return.gpu0 all of it
 *   block.<function>=5000        it takes so many milliseconds first, or until this line is gone
 *   events=0:8:79,1:8:31:2       GPU:type:data and perhaps :GPU instance; each is given once to every event set
 *
 * To leave a function out, as an old driver does, compile with -D<function>=absent_<function>.
 */
#define _GNU_SOURCE
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, VERSION_MISMATCH = 25 };
enum { MOST_GPUS = 16, MOST_MIGS = 8, MOST_TEXT = 1 << 16, WAIT_MS = 5 };

typedef unsigned long long u64;
typedef struct { int gpu, mig; } Device; /* mig -1 = the whole GPU */
typedef struct { u64 types[MOST_GPUS]; int given, changes; } EventSet; /* changes of the file wake who waits */
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; u64 used; unsigned gi, ci; } Process;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version, sensor; int value; } TemperatureV;
typedef struct { Device *device; u64 type, data; unsigned gi, ci; } EventData;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } Pci;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, status;
    union { double d; unsigned ui; u64 ull; } value;
} FieldValue;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char path[4096], text[MOST_TEXT + 1];
static struct stat seen;
static atomic_int users; /* by several threads at once */
static Device devices[MOST_GPUS][MOST_MIGS + 1];

static void load(void) {
    struct stat now;
    if (stat(path, &now) != 0 || (now.st_ino == seen.st_ino && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec &&
                                  now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_size == seen.st_size))
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    text[0] = '\n'; /* every key stands after a line break */
    text[1 + fread(text + 1, 1, MOST_TEXT - 1, file)] = 0;
    fclose(file);
    seen = now;
}

/* The value of a key, or 0 if it is not told. */
static int told(const char *key, char *value, size_t size) {
    char wanted[256];
    snprintf(wanted, sizeof wanted, "\n%s=", key);
    pthread_mutex_lock(&lock);
    load();
    const char *found = strstr(text, wanted);
    if (found) {
        found += strlen(wanted);
        size_t length = strcspn(found, "\n");
        if (length >= size) length = size - 1;
        memcpy(value, found, length);
        value[length] = 0;
    }
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

static long number(const char *key, long otherwise) {
    char value[64];
    return told(key, value, sizeof value) ? strtol(value, NULL, 0) : otherwise;
}

static void nap(long ms) {
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&rest, NULL);
}

/* What every call does first: block if it should, then fail if it should. */
static int enter(const char *function, const Device *device) {
    char key[256];
    snprintf(key, sizeof key, "block.%s", function);
    for (long waited = 0; waited < number(key, 0); waited += WAIT_MS) nap(WAIT_MS);
    snprintf(key, sizeof key, "return.%s", function);
    long code = number(key, SUCCESS);
    if (!code && device) {
        snprintf(key, sizeof key, "return.gpu%d.%s", device->gpu, function);
        code = number(key, SUCCESS);
    }
    if (!code && device) {
        snprintf(key, sizeof key, "return.gpu%d", device->gpu);
        code = number(key, SUCCESS);
    }
    return code || users ? (int)code : UNINITIALIZED;
}

#define ENTER(device) do { int code = enter(__func__, device); if (code) return code; } while (0)
#define WHOLE(device) do { if ((device)->mig >= 0) return NOT_SUPPORTED; } while (0)

static void key_of(const Device *device, const char *name, char *key, size_t size) {
    if (device->mig < 0) snprintf(key, size, "gpu%d.%s", device->gpu, name);
    else snprintf(key, size, "gpu%d.mig%d.%s", device->gpu, device->mig, name);
}

static int figure(const Device *device, const char *name, u64 *out) {
    char key[128], value[64];
    key_of(device, name, key, sizeof key);
    if (!told(key, value, sizeof value)) return NOT_SUPPORTED;
    *out = strtoull(value, NULL, 0);
    return SUCCESS;
}

static int small_figure(const Device *device, const char *name, unsigned *out) {
    u64 value = 0;
    int code = figure(device, name, &value);
    if (!code) *out = (unsigned)value;
    return code;
}

static int word(const Device *device, const char *name, char *out, unsigned size) {
    char key[128];
    key_of(device, name, key, sizeof key);
    return told(key, out, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *name = getenv("NVML_STAND_IN");
    if (!name) return DRIVER_NOT_LOADED;
    pthread_mutex_lock(&lock);
    snprintf(path, sizeof path, "%s", name);
    memset(&seen, 0, sizeof seen);
    pthread_mutex_unlock(&lock);
    for (int gpu = 0; gpu < MOST_GPUS; gpu++)
        for (int mig = 0; mig <= MOST_MIGS; mig++) devices[gpu][mig] = (Device){gpu, mig - 1};
    users++; /* or `enter` would say that it is not initialised */
    int code = enter(__func__, NULL);
    if (code) users--;
    return code;
}

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

/* For tests: how often NVML is in use. */
int stand_in_users(void) { return users; }

/* For tests: what the structures look like, to be compared with those of pynvml: size, then where each field is. */
#define AT(type, field) (unsigned)offsetof(type, field)
unsigned stand_in_memory[] = {sizeof(Memory), AT(Memory, total), AT(Memory, free), AT(Memory, used)};
unsigned stand_in_memory_v2[] = {sizeof(MemoryV2), AT(MemoryV2, version), AT(MemoryV2, total), AT(MemoryV2, reserved),
                                 AT(MemoryV2, free), AT(MemoryV2, used)};
unsigned stand_in_process[] = {sizeof(Process), AT(Process, pid), AT(Process, used), AT(Process, gi), AT(Process, ci)};
unsigned stand_in_utilization[] = {sizeof(Utilization), AT(Utilization, gpu), AT(Utilization, memory)};
unsigned stand_in_temperature[] = {sizeof(TemperatureV), AT(TemperatureV, version), AT(TemperatureV, sensor),
                                   AT(TemperatureV, value)};
unsigned stand_in_event[] = {sizeof(EventData), AT(EventData, device), AT(EventData, type), AT(EventData, data),
                             AT(EventData, gi), AT(EventData, ci)};
unsigned stand_in_pci[] = {sizeof(Pci), AT(Pci, legacy), AT(Pci, domain), AT(Pci, bus), AT(Pci, device), AT(Pci, id),
                           AT(Pci, subsystem), AT(Pci, text)};
unsigned stand_in_field[] = {sizeof(FieldValue), AT(FieldValue, field), AT(FieldValue, scope), AT(FieldValue, timestamp),
                             AT(FieldValue, latency), AT(FieldValue, type), AT(FieldValue, status),
                             AT(FieldValue, value)};

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the stand-in";
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    ENTER(NULL);
    return told("driver", out, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    ENTER(NULL);
    char key[64];
    snprintf(key, sizeof key, "process.%u", pid);
    return told(key, out, size) ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    ENTER(NULL);
    *out = (unsigned)number("count", 0);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (index >= MOST_GPUS || index >= (unsigned)number("count", 0)) return INVALID_ARGUMENT;
    ENTER(&devices[index][0]);
    *out = &devices[index][0];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) {
    ENTER(device);
    return word(device, "uuid", out, size);
}

int nvmlDeviceGetName(Device *device, char *out, unsigned size) {
    ENTER(device);
    return word(&devices[device->gpu][0], "name", out, size);
}

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *out) {
    ENTER(device);
    memset(out, 0, sizeof *out);
    int code = word(&devices[device->gpu][0], "bus", out->text, sizeof out->text);
    if (!code) sscanf(out->text, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    return code;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    ENTER(device);
    WHOLE(device);
    int code = small_figure(device, "util", &out->gpu);
    return code ? code : small_figure(device, "memory_util", &out->memory);
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    ENTER(device);
    if (out->version != (sizeof *out | 2u << 24)) return VERSION_MISMATCH;
    int code = figure(device, "total", &out->total);
    if (!code) code = figure(device, "used", &out->used);
    if (figure(device, "reserved", &out->reserved)) out->reserved = 0;
    out->free = out->total - out->used - out->reserved;
    return code;
}

/* The older one counts what the driver keeps for itself as used. */
int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) {
    ENTER(device);
    u64 reserved = 0;
    int code = figure(device, "total", &out->total);
    if (!code) code = figure(device, "used", &out->used);
    figure(device, "reserved", &reserved);
    out->used += reserved;
    out->free = out->total - out->used;
    return code;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    ENTER(device);
    char key[128], value[4096], *rest = value, *one;
    key_of(device, "processes", key, sizeof key);
    if (!told(key, value, sizeof value)) return NOT_SUPPORTED;
    unsigned room = *count, found = 0;
    while ((one = strsep(&rest, ","))) {
        char *bytes = strchr(one, ':');
        if (!bytes) continue;
        if (out && found < room)
            out[found] = (Process){strtoul(one, NULL, 0), bytes[1] == '-' ? ~0ull : strtoull(bytes + 1, NULL, 0), ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* Only whether these two are there says something: a driver with the first and without the second tells processes in
 * another form. */
int nvmlDeviceGetConfComputeMemSizeInfo(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetRunningProcessDetailList(void) { return NOT_SUPPORTED; }

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out) {
    ENTER(device);
    WHOLE(device);
    return sensor ? INVALID_ARGUMENT : small_figure(device, "temperature", out);
}

/* The newer question: version 1 of its structure holds sensor and answer. */
int nvmlDeviceGetTemperatureV(Device *device, TemperatureV *out) {
    ENTER(device);
    WHOLE(device);
    if (out->version != (sizeof *out | 1u << 24)) return VERSION_MISMATCH;
    unsigned value = 0;
    int code = out->sensor ? INVALID_ARGUMENT : small_figure(device, "temperature", &value);
    out->value = (int)value;
    return code;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *out) {
    ENTER(device);
    WHOLE(device);
    return small_figure(device, "power", out);
}

int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *out) {
    ENTER(device);
    WHOLE(device);
    return small_figure(device, "power_limit", out);
}

int nvmlDeviceGetClockInfo(Device *device, unsigned kind, unsigned *out) {
    ENTER(device);
    WHOLE(device);
    return small_figure(device, kind == 1 ? "sm" : "memory_clock", out);
}

int nvmlDeviceGetMaxClockInfo(Device *device, unsigned kind, unsigned *out) {
    ENTER(device);
    WHOLE(device);
    return small_figure(device, kind == 1 ? "sm_max" : "memory_clock_max", out);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, u64 *out) {
    ENTER(device);
    WHOLE(device);
    return figure(device, "throttle", out);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, u64 *out) {
    ENTER(device);
    WHOLE(device);
    return figure(device, "throttle", out);
}

int nvmlDeviceGetPcieThroughput(Device *device, unsigned counter, unsigned *out) {
    ENTER(device);
    WHOLE(device);
    return small_figure(device, counter ? "pcie_rx" : "pcie_tx", out);
}

int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    ENTER(device);
    WHOLE(device);
    for (int k = 0; k < count; k++) {
        FieldValue *one = &values[k];
        const char *name = one->field == 138 ? "nvlink_tx" : one->field == 139 ? "nvlink_rx" : "";
        one->type = 3;
        /* Of all links together, as the sampler asks; a single link is not told. */
        one->status = one->scope == ~0u ? (unsigned)figure(device, name, &one->value.ull) : INVALID_ARGUMENT;
    }
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, u64 *out) {
    ENTER(device);
    WHOLE(device);
    return counter ? INVALID_ARGUMENT : figure(device, kind ? "ecc_uncorrected" : "ecc_corrected", out);
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    ENTER(device);
    WHOLE(device);
    unsigned count;
    *current = *pending = small_figure(device, "mig", &count) == SUCCESS;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out) {
    ENTER(device);
    *out = MOST_MIGS - 1;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
    ENTER(device);
    unsigned count = 0;
    small_figure(device, "mig", &count);
    if (index >= count) return NOT_FOUND;
    *out = &devices[device->gpu][index + 1];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *out) {
    ENTER(device);
    return small_figure(device, "gi", out);
}

int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *out) {
    ENTER(device);
    return small_figure(device, "ci", out);
}

int nvmlDeviceGetSupportedEventTypes(Device *device, u64 *out) {
    ENTER(device);
    WHOLE(device);
    return figure(device, "event_types", out);
}

int nvmlEventSetCreate(EventSet **out) {
    ENTER(NULL);
    char folder[sizeof path];
    *out = calloc(1, sizeof **out);
    snprintf(folder, sizeof folder, "%s", path);
    (*out)->changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    inotify_add_watch((*out)->changes, dirname(folder), IN_MOVED_TO);
    return SUCCESS;
}

int nvmlEventSetFree(EventSet *set) {
    ENTER(NULL);
    close(set->changes);
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, u64 types, EventSet *set) {
    ENTER(device);
    WHOLE(device);
    u64 supported = 0;
    int code = figure(device, "event_types", &supported);
    if (code || (types & ~supported)) return NOT_SUPPORTED;
    set->types[device->gpu] = types;
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
    ENTER(NULL);
    for (;;) {
        char value[4096], *rest = value, *one;
        if (told("events", value, sizeof value)) {
            for (int k = 0; (one = strsep(&rest, ",")); k++) {
                unsigned gpu, gi = ~0u;
                u64 type, data;
                if (k < set->given || sscanf(one, "%u:%llu:%llu:%u", &gpu, &type, &data, &gi) < 3) continue;
                set->given = k + 1;
                if (gpu >= MOST_GPUS || !(set->types[gpu] & type)) continue;
                *out = (EventData){&devices[gpu][0], type, data, gi, ~0u};
                return SUCCESS;
            }
        }
        /* Waits like the real one, at no cost; a change of the file begins the time anew, which harms nobody. */
        struct pollfd changed = {set->changes, POLLIN, 0};
        if (poll(&changed, 1, (int)timeout_ms) <= 0) return TIMEOUT;
        while (read(set->changes, value, sizeof value) > 0) continue;
    }
}
