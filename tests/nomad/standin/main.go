// Stand-in for NVIDIA's device plugin: it reports GPUs that are not there, so that a development
// agent places what asks for them. What it reports (vendor, type, the attribute `memory` in MiB, the
// variable it sets) is as NVIDIA's plugin does; Nomad's scheduler and driver are the real ones.
package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/helper/pointer"
	"github.com/hashicorp/nomad/plugins"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"
	"github.com/hashicorp/nomad/plugins/shared/structs"
)

const (
	vendor = "nvidia"
	name   = "Stand-in GPU"
)

type config struct {
	Count     int `codec:"count"`
	MemoryMiB int `codec:"memory_mib"`
}

type plugin struct {
	config config
}

func main() {
	plugins.Serve(func(hclog.Logger) interface{} { return &plugin{} })
}

func (p *plugin) PluginInfo() (*base.PluginInfoResponse, error) {
	return &base.PluginInfoResponse{
		Type:              base.PluginTypeDevice,
		PluginApiVersions: []string{device.ApiVersion010},
		PluginVersion:     "v0.1.0",
		Name:              "standin-gpu",
	}, nil
}

func (p *plugin) ConfigSchema() (*hclspec.Spec, error) {
	return hclspec.NewObject(map[string]*hclspec.Spec{
		"count":      hclspec.NewAttr("count", "number", true),
		"memory_mib": hclspec.NewAttr("memory_mib", "number", true),
	}), nil
}

func (p *plugin) SetConfig(c *base.Config) error {
	return base.MsgPackDecode(c.PluginConfig, &p.config)
}

// Fingerprint reports the GPUs once; they do not change.
func (p *plugin) Fingerprint(ctx context.Context) (<-chan *device.FingerprintResponse, error) {
	devices := make([]*device.Device, p.config.Count)
	for i := range devices {
		devices[i] = &device.Device{ID: fmt.Sprintf("GPU-%d", i), Healthy: true}
	}
	group := &device.DeviceGroup{
		Vendor:  vendor,
		Type:    device.DeviceTypeGPU,
		Name:    name,
		Devices: devices,
		Attributes: map[string]*structs.Attribute{
			"memory": {Int: pointer.Of(int64(p.config.MemoryMiB)), Unit: structs.UnitMiB},
		},
	}
	found := make(chan *device.FingerprintResponse, 1)
	found <- device.NewFingerprint(group)
	go func() {
		<-ctx.Done()
		close(found)
	}()
	return found, nil
}

func (p *plugin) Reserve(ids []string) (*device.ContainerReservation, error) {
	return &device.ContainerReservation{
		Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")},
	}, nil
}

// Stats has nothing to say, and says it until the agent stops.
func (p *plugin) Stats(ctx context.Context, _ time.Duration) (<-chan *device.StatsResponse, error) {
	said := make(chan *device.StatsResponse)
	go func() {
		<-ctx.Done()
		close(said)
	}()
	return said, nil
}
