// Package storage stands in for Google's storage, which Nomad can fetch artifacts from, and for its
// client. See tests/nomad/go.mod.
package storage

import (
	"context"
	"errors"
	"io"

	"google.golang.org/api/option"
)

var errAbsent = errors.New("this Nomad is built without Google's storage")

type (
	// Client cannot be made.
	Client struct{}
	// BucketHandle has no objects.
	BucketHandle struct{}
	// ObjectHandle cannot be read.
	ObjectHandle struct{}
	// ObjectIterator ends with an error.
	ObjectIterator struct{}
	// ObjectAttrs describes an object.
	ObjectAttrs struct{ Name string }
	// Query chooses objects.
	Query struct{ Prefix string }
	// Reader reads an object.
	Reader struct{ io.ReadCloser }
)

// NewClient refuses.
func NewClient(context.Context, ...option.ClientOption) (*Client, error) { return nil, errAbsent }

// Bucket returns a bucket.
func (*Client) Bucket(string) *BucketHandle { return &BucketHandle{} }

// Object returns an object.
func (*BucketHandle) Object(string) *ObjectHandle { return &ObjectHandle{} }

// Objects returns an iterator.
func (*BucketHandle) Objects(context.Context, *Query) *ObjectIterator { return &ObjectIterator{} }

// Next refuses.
func (*ObjectIterator) Next() (*ObjectAttrs, error) { return nil, errAbsent }

// Generation returns the object.
func (o *ObjectHandle) Generation(int64) *ObjectHandle { return o }

// NewReader refuses.
func (*ObjectHandle) NewReader(context.Context) (*Reader, error) { return nil, errAbsent }
