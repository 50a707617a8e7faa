/* Decides, from time to time, whether the container's processes get as much CPU as they would use.
 *
 * A span counts as far as a whole CPU had more time in it than the container used and the machine had idle, and only if a
 * thread of the container is runnable at its end. So time in which code sleeps, waits for a lock or uses CPU does not count,
 * unless no CPU is idle and the code wakes for each look; time in which it waits for a CPU does.
 */
#define _GNU_SOURCE
#include "starvation.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double starved_s, looked_at, idle_s, used_s; /* idle_s is the machine's idle time at the last look, -1 if unknown */

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

unsigned long long cpu_ns(void) {
    static const char *const files[] = {"/sys/fs/cgroup/cpuacct/cpuacct.usage", "/sys/fs/cgroup/cpu.stat"};
    for (int version = 0; version < 2; version++) {
        unsigned long long used = 0;
        FILE *file = fopen(files[version], "re");
        if (!file) continue;
        int found = fscanf(file, version ? "usage_usec %llu" : "%llu", &used) == 1;
        fclose(file);
        if (found) return version ? used * 1000 : used;
    }
    return 0;
}

/* Time for which the machine's CPUs were idle, added up; -1 if it is unknown. */
static double machine_idle_s(void) {
    unsigned long long idle, waiting_for_disk;
    FILE *file = fopen("/proc/stat", "re");
    if (!file) return -1;
    int found = fscanf(file, "cpu %*u %*u %*u %llu %llu", &idle, &waiting_for_disk);
    fclose(file);
    return found == 2 ? (double)(idle + waiting_for_disk) / (double)sysconf(_SC_CLK_TCK) : -1;
}

static int is_runnable(const char *process, const char *thread) {
    char path[64], line[512];
    snprintf(path, sizeof(path), "/proc/%.16s/task/%.16s/stat", process, thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t got = read(file, line, sizeof(line) - 1);
    close(file);
    line[got > 0 ? got : 0] = '\0';
    char *name_end = strrchr(line, ')'); /* the state comes after the name */
    return name_end && !strncmp(name_end, ") R", 3);
}

static int has_runnable_thread(const char *process) {
    char path[64];
    int found = 0;
    snprintf(path, sizeof(path), "/proc/%.16s/task", process);
    DIR *threads = opendir(path);
    if (!threads) return 0;
    for (struct dirent *thread; !found && (thread = readdir(threads));)
        found = thread->d_name[0] != '.' && is_runnable(process, thread->d_name);
    closedir(threads);
    return found;
}

/* Whether a thread of another process runs or waits for a CPU. */
static int anyone_runnable(void) {
    int found = 0;
    DIR *proc = opendir("/proc");
    if (!proc) return 0;
    for (struct dirent *entry; !found && (entry = readdir(proc));)
        found = entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && strcmp(entry->d_name, "1")
            && has_runnable_thread(entry->d_name);
    closedir(proc);
    return found;
}

void begin_looking(void) {
    starved_s = 0;
    looked_at = now();
    idle_s = -1; /* the first look only reads the clocks; a short command ends before it */
}

void look(double pause_s) {
    double at = now();
    if (at - looked_at < pause_s) return;
    double idle = machine_idle_s(), used = (double)cpu_ns() / 1e9;
    double missing_s = (at - looked_at) - (idle - idle_s) - (used - used_s);
    if (idle_s >= 0 && idle >= 0 && missing_s > 0 && anyone_runnable()) starved_s += missing_s;
    looked_at = at;
    idle_s = idle;
    used_s = used;
}

uint32_t starved_ms(void) {
    return (uint32_t)(starved_s * 1000);
}
