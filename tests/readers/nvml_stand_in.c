/* A stand-in for libnvidia-ml.so.1, as far as the readers ask it. Its GPUs are healthy, except for what a state file says, which is read anew
 * at each call: lines of a name and a value, as `init 18`, `gpu1.temperature 90`, `gpu1.fail 15` (every call about GPU 1 returns 15),
 * `gpu1.nvmlDeviceGetEccMode 3` (that call does). Events come from a second file that is appended to: `1 79` is Xid 79 of GPU 1.
 * Signatures and structures are those of nvml.h, as pynvml uses them. Built with -DOLD it lacks what older drivers lack.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NVML __attribute__((visibility("default")))
enum { OK = 0, BAD_ARGUMENT = 2, UNSUPPORTED = 3, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15 };
typedef struct { int index; } Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } Pci;
typedef struct { unsigned id, scope; int64_t at, latency; int type, status; union { double d; unsigned u; uint64_t l; } value; } Field;
typedef struct { unsigned pid; uint64_t memory; unsigned gi, ci; } Process;
typedef struct { Device *device; uint64_t type, data; unsigned gi, ci; } Event;
typedef struct { unsigned version; uint8_t uuid[16]; int status; uint32_t clique; uint8_t state; uint32_t health; } Fabric;
static Device devices[16];

static int find(const char *name, char *value, size_t room) {
    char line[256], word[128], rest[128];
    const char *path = getenv("NVML_STAND_IN_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    int found = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%127s %127[^\n]", word, rest) == 2 && !strcmp(word, name)) { snprintf(value, room, "%s", rest); found = 1; }
    if (file) fclose(file);
    return found;
}

static uint64_t number(const char *name, uint64_t otherwise) {
    char value[128];
    return find(name, value, sizeof value) ? strtoull(value, NULL, 0) : otherwise;
}

static uint64_t of(const Device *gpu, const char *name, uint64_t otherwise) {
    char key[160];
    snprintf(key, sizeof key, "gpu%d.%s", gpu->index, name);
    return number(key, otherwise);
}

static int refused(const Device *gpu, const char *function) {
    int fails = (int)of(gpu, "fail", OK);
    return fails ? fails : (int)of(gpu, function, OK);
}

#define ASK(gpu) do { int no = refused(gpu, __func__); if (no) return no; } while (0)
#define GET(function, name, otherwise) \
    NVML int function(Device *gpu, unsigned *value) { ASK(gpu); *value = (unsigned)of(gpu, name, otherwise); return OK; }
#define GET_OF(function, kind, name, name_of_others, otherwise) \
    NVML int function(Device *gpu, int which, unsigned *value) \
    { ASK(gpu); *value = (unsigned)of(gpu, which == kind ? name : name_of_others, otherwise); return OK; }

NVML int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)number("init", OK); }
NVML int nvmlInit_v2(void) { return (int)number("init", OK); }
NVML int nvmlShutdown(void) { return OK; }
NVML const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "refused by the stand-in"; }
NVML int nvmlSystemGetDriverVersion(char *text, unsigned room) {
    if (!find("driver", text, room)) snprintf(text, room, "550.54.15");
    return OK;
}
NVML int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("count", 2); return OK; }
NVML int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **gpu) {
    devices[index].index = (int)index;
    *gpu = &devices[index];
    return (int)of(*gpu, __func__, OK);
}
NVML int nvmlDeviceGetPciInfo_v3(Device *gpu, Pci *pci) {
    ASK(gpu);
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x18 + 0x10 * (unsigned)gpu->index;
    snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", pci->bus);
    return OK;
}
NVML int nvmlDeviceGetUUID(Device *gpu, char *text, unsigned room) { ASK(gpu); snprintf(text, room, "GPU-%d", gpu->index); return OK; }
NVML int nvmlDeviceGetName(Device *gpu, char *text, unsigned room) { ASK(gpu); snprintf(text, room, "NVIDIA Stand-in"); return OK; }

GET(nvmlDeviceGetPersistenceMode, "persistence", 1)
GET(nvmlDeviceGetPowerUsage, "power", 300000)
GET(nvmlDeviceGetEnforcedPowerLimit, "power_limit", 700000)
GET(nvmlDeviceGetPowerManagementDefaultLimit, "power_default", 700000)
GET(nvmlDeviceGetPerformanceState, "performance_state", 0)
GET(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", 5)
GET(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_most", 5)
GET(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
GET(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_most", 16)
GET(nvmlDeviceGetPcieReplayCounter, "pcie_replays", 0)
GET_OF(nvmlDeviceGetClockInfo, 1, "sm", "memory_clock", 1980)
GET_OF(nvmlDeviceGetMaxClockInfo, 1, "sm_most", "memory_clock_most", 1980)
GET_OF(nvmlDeviceGetTemperature, 0, "temperature", "temperature", 45)
NVML int nvmlDeviceGetTemperatureThreshold(Device *gpu, int which, unsigned *value) {
    ASK(gpu);
    *value = (unsigned)(which ? of(gpu, "slowdown_at", 87) : of(gpu, "shutdown_at", 92));
    return OK;
}
NVML int nvmlDeviceGetCurrentClocksEventReasons(Device *gpu, uint64_t *value) { ASK(gpu); *value = of(gpu, "reasons", 0); return OK; }
NVML int nvmlDeviceGetUtilizationRates(Device *gpu, unsigned *rates) { ASK(gpu); rates[0] = (unsigned)of(gpu, "utilization", 97); rates[1] = 0; return OK; }
NVML int nvmlDeviceGetMemoryInfo(Device *gpu, uint64_t *bytes) { ASK(gpu); bytes[2] = of(gpu, "memory_used", 1 << 20); bytes[0] = bytes[1] = 1 << 30; return OK; }
NVML int nvmlDeviceGetEccMode(Device *gpu, unsigned *now, unsigned *later) { ASK(gpu); *now = *later = (unsigned)of(gpu, "ecc_mode", 1); return OK; }
NVML int nvmlDeviceGetTotalEccErrors(Device *gpu, int uncorrected, int aggregate, uint64_t *count) {
    static const char *names[2][2] = {{"volatile_corrected", "aggregate_corrected"}, {"volatile_uncorrected", "aggregate_uncorrected"}};
    ASK(gpu);
    *count = of(gpu, names[!!uncorrected][!!aggregate], 0);
    return OK;
}
NVML int nvmlDeviceGetRemappedRows(Device *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ASK(gpu);
    *corrected = (unsigned)of(gpu, "rows_corrected", 0);
    *uncorrected = (unsigned)of(gpu, "rows_uncorrected", 0);
    *pending = (unsigned)of(gpu, "rows_pending", 0);
    *failed = (unsigned)of(gpu, "rows_failed", 0);
    return OK;
}
NVML int nvmlDeviceGetRetiredPages(Device *gpu, int cause, unsigned *count, uint64_t *addresses) {
    unsigned there = (unsigned)of(gpu, cause ? "pages_double" : "pages_single", 0), room = *count;
    ASK(gpu);
    *count = there;
    if (!addresses) return there ? TOO_SMALL : OK;
    for (unsigned page = 0; page < there && page < room; page++) addresses[page] = 4096 * page;
    return there > room ? TOO_SMALL : OK;
}
GET(nvmlDeviceGetRetiredPagesPendingStatus, "pages_pending", 0)

NVML int nvmlDeviceGetNvLinkState(Device *gpu, unsigned link, unsigned *active) {
    char name[32];
    ASK(gpu);
    if (link >= of(gpu, "links", 4)) return BAD_ARGUMENT;
    snprintf(name, sizeof name, "link%u.active", link);
    *active = (unsigned)of(gpu, name, 1);
    return OK;
}
NVML int nvmlDeviceGetNvLinkErrorCounter(Device *gpu, unsigned link, int kind, uint64_t *count) {
    static const char *kinds[] = {"replays", "recoveries", "crc_flit", "crc_data"};
    char name[32];
    ASK(gpu);
    snprintf(name, sizeof name, "link%u.%s", link, kinds[kind & 3]);
    *count = of(gpu, name, 0);
    return OK;
}
NVML int nvmlDeviceGetFieldValues(Device *gpu, int count, Field *fields) {
    ASK(gpu);
    for (int at = 0; at < count; at++) {
        fields[at].status = OK;
        if (fields[at].id == 82) fields[at].value.u = (unsigned)of(gpu, "memory_temperature", 55);
        else if (fields[at].id == 230) fields[at].value.u = (unsigned)of(gpu, "recovery_action", 0);
        else fields[at].status = UNSUPPORTED;
    }
    return OK;
}
NVML int nvmlDeviceGetComputeRunningProcesses_v3(Device *gpu, unsigned *count, Process *processes) {
    uint64_t pid = of(gpu, "process", 0);
    ASK(gpu);
    if (!pid) { *count = 0; return OK; }
    if (!processes || !*count) { *count = 1; return TOO_SMALL; }
    memset(processes, 0, sizeof *processes);
    processes->pid = (unsigned)pid;
    processes->memory = of(gpu, "process_memory", 1 << 30);
    *count = 1;
    return OK;
}
#ifndef OLD
NVML int nvmlDeviceGetRowRemapperHistogram(Device *gpu, unsigned *banks) {
    ASK(gpu);
    memset(banks, 0, 5 * sizeof *banks);
    banks[0] = 640;
    banks[4] = (unsigned)of(gpu, "banks_without_spares", 0);
    return OK;
}
NVML int nvmlDeviceGetGpuFabricInfoV(Device *gpu, Fabric *fabric) {
    ASK(gpu);
    fabric->state = (uint8_t)of(gpu, "fabric_state", 3);
    fabric->status = (int)of(gpu, "fabric_status", OK);
    return OK;
}
#endif

static long position;

NVML int nvmlEventSetCreate(void **set) { *set = &position; position = 0; return (int)number(__func__, OK); }
NVML int nvmlEventSetFree(void *set) { (void)set; return OK; }
NVML int nvmlDeviceRegisterEvents(Device *gpu, uint64_t types, void *set) { (void)types; (void)set; ASK(gpu); return OK; }
NVML int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    struct timespec moment = {0, 5000000};
    (void)set;
    for (unsigned waited = 0; waited <= milliseconds; waited += 5, nanosleep(&moment, NULL)) {
        const char *path = getenv("NVML_STAND_IN_EVENTS");
        FILE *file = path ? fopen(path, "r") : NULL;
        unsigned index, xid;
        int whole = 0, broken = (int)number("wait", OK);
        if (broken) { if (file) fclose(file); return broken; }
        if (file && !fseek(file, position, SEEK_SET) && fscanf(file, "%u %u", &index, &xid) == 2 && fgetc(file) == '\n') {
            position = ftell(file);
            *event = (Event){.device = &devices[index], .type = 8, .data = xid};
            whole = 1;
        }
        if (file) fclose(file);
        if (whole) return OK;
    }
    return TIMEOUT;
}
