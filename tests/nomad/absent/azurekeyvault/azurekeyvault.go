// Package azurekeyvault stands in for a key management service that no test uses, and for the client of its
// cloud. See tests/nomad/go.mod.
package azurekeyvault

import wrapping "github.com/hashicorp/go-kms-wrapping/v2"

// NewWrapper returns the interface without an implementation: each call of it panics.
func NewWrapper() wrapping.Wrapper { return struct{ wrapping.Wrapper }{} }
