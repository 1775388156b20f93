metadata description = 'The namespace, the topic for events, the queue for approve commands, and the roles of senders and receivers.'

param name string
param location string
param tags object
@allowed(['Standard', 'Premium'])
param sku string
param capacity int
param topicName string
param queueName string

@description('Principal ids of the publishers.')
param publisherIds string[]

@description('Principal ids of the receivers of commands.')
param listenerIds string[]

@description('Object ids of the senders of commands.')
param approverIds string[]
@allowed(['Group', 'ServicePrincipal', 'User'])
param approverType string

@description('Whether public networks may connect; the template always sets it.')
@allowed(['Enabled', 'Disabled'])
param publicNetworkAccess string

@description('Public addresses that may connect; empty: the rules of the namespace stay as they are.')
param allowedIpRanges string[]

@description('Resource id of a Log Analytics workspace for logs and metrics; empty: none.')
param workspaceId string

var topicMegabytes = 5120

var dataSender = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '69a216fc-b8fb-44d8-bc22-1f3c2cd27a39')
var dataReceiver = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '4f6d3b9b-027b-4f4c-9142-0e5a2a2247e0')

// Zone redundancy is not set: the service turns it on in regions with zones.
resource bus 'Microsoft.ServiceBus/namespaces@2024-01-01' = {
  name: name
  location: location
  tags: tags
  sku: {
    name: sku
    tier: sku
    capacity: sku == 'Premium' ? capacity : null
  }
  properties: {
    disableLocalAuth: true
    minimumTlsVersion: '1.2'
    publicNetworkAccess: publicNetworkAccess
  }
}

// Without ranges nothing is written, so that rules from elsewhere are not opened.
resource network 'Microsoft.ServiceBus/namespaces/networkRuleSets@2024-01-01' = if (!empty(allowedIpRanges)) {
  parent: bus
  name: 'default'
  properties: {
    publicNetworkAccess: publicNetworkAccess
    defaultAction: 'Deny'
    ipRules: [for ip in allowedIpRanges: {
      ipMask: ip
      action: 'Allow'
    }]
  }
}

resource topic 'Microsoft.ServiceBus/namespaces/topics@2024-01-01' = {
  parent: bus
  name: topicName
  properties: {
    defaultMessageTimeToLive: 'P14D'
    // A full topic refuses new events: leave space for a reader that is down for days.
    maxSizeInMegabytes: topicMegabytes
    // The VMs of a group send the same event under the same id within seconds, but one that could not
    // reach the bus sends later. A day covers most outages; later duplicates are recognised by their id.
    requiresDuplicateDetection: true
    duplicateDetectionHistoryTimeWindow: 'P1D'
    supportOrdering: true
  }
}

resource queue 'Microsoft.ServiceBus/namespaces/queues@2024-01-01' = {
  parent: bus
  name: queueName
  properties: {
    requiresSession: true // one session for each VM
    lockDuration: 'PT1M' // renewed while a command waits; after a crash the session is released within a minute
    maxDeliveryCount: 10
    defaultMessageTimeToLive: 'PT2H' // a listener at rest looks once an hour, and answers what waits then
    deadLetteringOnMessageExpiration: true
    // The listener answers a repeated command with its receipt; duplicate detection would drop the command.
    requiresDuplicateDetection: false
  }
}

resource publisherSends 'Microsoft.Authorization/roleAssignments@2022-04-01' = [for id in publisherIds: {
  scope: topic
  name: guid(topic.id, id, dataSender)
  properties: {
    roleDefinitionId: dataSender
    principalId: id
    principalType: 'ServicePrincipal'
  }
}]

resource listenerReceives 'Microsoft.Authorization/roleAssignments@2022-04-01' = [for id in listenerIds: {
  scope: queue
  name: guid(queue.id, id, dataReceiver)
  properties: {
    roleDefinitionId: dataReceiver
    principalId: id
    principalType: 'ServicePrincipal'
  }
}]

resource approverSends 'Microsoft.Authorization/roleAssignments@2022-04-01' = [for id in approverIds: {
  scope: queue
  name: guid(queue.id, id, dataSender)
  properties: {
    roleDefinitionId: dataSender
    principalId: id
    principalType: approverType
  }
}]

resource logs 'Microsoft.Insights/diagnosticSettings@2021-05-01-preview' = if (!empty(workspaceId)) {
  scope: bus
  name: 'imds-bridge'
  properties: {
    workspaceId: workspaceId
    logs: [
      {
        categoryGroup: 'allLogs'
        enabled: true
      }
    ]
    metrics: [
      {
        category: 'AllMetrics'
        enabled: true
      }
    ]
  }
}

output id string = bus.id
output topicMegabytes int = topicMegabytes
output hostName string = split(split(bus.properties.serviceBusEndpoint, '://')[1], ':')[0]
