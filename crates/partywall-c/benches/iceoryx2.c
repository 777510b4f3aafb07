/* The samples of calls.rs by iceoryx2's C binding, which has no blocks: that row of it is the call of a function. */
#include "iox2/iceoryx2.h"

#include <stdio.h>
#include <time.h>

#define OK(call)                                   \
    if ((call) != IOX2_OK) {                       \
        fprintf(stderr, "%s has failed\n", #call); \
        return 1;                                  \
    }

static iox2_publisher_h publisher;
static iox2_subscriber_h subscriber;

int calls_open(void) {
    static const char NAME[] = "partywall/calls", TYPE[] = "64 bytes";
    iox2_node_h node;
    iox2_service_name_h name;
    iox2_port_factory_pub_sub_h service;
    iox2_set_log_level(iox2_log_level_e_ERROR);
    OK(iox2_node_builder_create(iox2_node_builder_new(NULL), NULL, iox2_service_type_e_IPC, &node));
    OK(iox2_service_name_new(NULL, NAME, sizeof NAME - 1, &name));
    iox2_service_builder_h builder = iox2_node_service_builder(&node, NULL, iox2_cast_service_name_ptr(name));
    iox2_service_builder_pub_sub_h samples = iox2_service_builder_pub_sub(builder);
    OK(iox2_service_builder_pub_sub_set_payload_type_details(&samples, iox2_type_variant_e_FIXED_SIZE, TYPE,
                                                             sizeof TYPE - 1, 64, 8));
    OK(iox2_service_builder_pub_sub_open_or_create(samples, NULL, &service));
    OK(iox2_port_factory_publisher_builder_create(iox2_port_factory_pub_sub_publisher_builder(&service, NULL), NULL,
                                                  &publisher));
    OK(iox2_port_factory_subscriber_builder_create(iox2_port_factory_pub_sub_subscriber_builder(&service, NULL), NULL,
                                                   &subscriber));
    return 0;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

int calls_measure(int calls, double times[2]) {
    /* On the stack, as its C++ has them. */
    iox2_sample_mut_t loan_storage;
    iox2_sample_t sample_storage;
    double start = now();
    for (int n = 0; n < calls; n++) {
        iox2_sample_mut_h loan;
        iox2_sample_h sample;
        void *data;
        const void *received;
        OK(iox2_publisher_loan(&publisher, &loan_storage, &loan));
        iox2_sample_mut_payload_mut(&loan, &data, NULL);
        *(volatile char *)data = 1;
        OK(iox2_sample_mut_send(loan, NULL));
        OK(iox2_subscriber_receive(&subscriber, &sample_storage, &sample));
        iox2_sample_payload(&sample, &received, NULL);
        (void)*(const volatile char *)received;
        iox2_sample_drop(sample);
    }
    times[0] = (now() - start) / calls;
    times[1] = 0;
    return 0;
}
